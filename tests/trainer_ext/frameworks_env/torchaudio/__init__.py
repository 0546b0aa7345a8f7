"""In place of torchaudio, which has no build for this torch on a CPU. LLaMA-Factory imports it, and uses it for sound alone."""
