"""A stand-in for flash-attn where there is no GPU: the functions of it that OpenRLHF imports, in plain torch.

Only for the tests' environment. The attention kernel itself is not here: `run.py` has the models use torch's own.
"""
