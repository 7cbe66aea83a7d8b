"""The inference contract on vLLM, as a plugin: no fork, no patched file, no dev mode.

``endpoints`` adds the routes in the API process, ``worker`` extends the workers, ``port`` joins the two. Written for
vLLM 0.32 (CPU and CUDA builds).
"""
