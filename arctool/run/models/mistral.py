"""Mistral 7B and successors (arXiv 2310.06825): Llama's layers, no biases; every layer may see a sliding window only.

The window is a number of the config (`sliding_windows`), so the layers are Llama's own.
"""

from __future__ import annotations

from arctool.run.models import llama
from arctool.run.models.spec import Architecture

MISTRAL = Architecture("MistralForCausalLM", llama.tensors, llama.build)
