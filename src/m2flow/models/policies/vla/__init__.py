"""Vision-language-action policies: native modules that load published checkpoints.

`openvla` is the network, `autoregressive` and `parallel` are the two ways of decoding actions from
it (OpenVLA and OpenVLA-OFT), `checkpoint` reads and writes folders, `tiny` makes a small one.
"""
