"""The reference inference server: transformers on the CPU, deterministic, small enough to read.

One sequence is decoded at a time, so the answer to (weights, prompt, seed) is the same bit for bit whatever else the
server does; tests compare whole training runs with a plain loop on that ground.
"""
