"""Write joined preference pairs in the file formats of other training stacks. Each stack has its own module."""

from reflogp.cli.exports.fairseq2 import write_fairseq2
from reflogp.cli.exports.joined import JoinedPairs, read_pairs
from reflogp.cli.exports.megatron_bridge import write_megatron_bridge
from reflogp.cli.exports.open_instruct import LossType, write_open_instruct

__all__ = ["JoinedPairs", "LossType", "read_pairs", "write_fairseq2", "write_megatron_bridge", "write_open_instruct"]
