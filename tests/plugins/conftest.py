"""Doubles of the engines for which plug-ins are made, if they are not installed."""

from tests.plugins.doubles import dynamo_double, sglang_double, vllm_double
from tests.plugins.doubles.finder import install_double

install_double("vllm", "vllm", "0.32.0", vllm_double)
install_double("sglang", "sglang", "0.5.23", sglang_double)
install_double("dynamo", "ai-dynamo", "1.6.1", dynamo_double)
