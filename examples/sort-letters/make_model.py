"""Makes ./model: a Qwen2 of 116,000 parameters that has just begun to understand the task.

It is initialised at random and taught with right answers for about two seconds, until it sorts 12 % of all strings
correctly when sampled; reinforcement learning does the rest. Runs once; --force makes it anew.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
from itertools import product
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the model is too small for more

import torch
from sort_letters import ALPHABET
from tokenizers import Tokenizer, decoders, models
from tokenizers.pre_tokenizers import ByteLevel
from torch.nn import functional as F  # noqa: N812
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from transformers.utils.logging import disable_progress_bar

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# No roles: with one token per byte their names would be two thirds of the prompt.
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>{% endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte: BPE without merges, which every loader reads alike."""
    vocabulary = {symbol: index for index, symbol in enumerate(sorted(ByteLevel.alphabet()) + SPECIALS)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=False))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=SPECIALS[0],
        eos_token=SPECIALS[2],
        additional_special_tokens=[SPECIALS[1]],
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = TEMPLATE
    return wrapped


def make_policy(tokenizer: PreTrainedTokenizerFast) -> Qwen2ForCausalLM:
    """Two layers, two heads of 32: the smallest head that vLLM's CPU attention takes."""
    config = Qwen2Config(
        vocab_size=264,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=False,
        initializer_range=0.02,
    )
    return Qwen2ForCausalLM(config).float()


def warm_start(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, letters: int, until: float) -> float:
    """Teach right answers until the probability of one, averaged over all strings, reaches ``until``; returns it."""
    rows = []
    for text in map("".join, product(ALPHABET, repeat=letters)):
        chat = [{"role": "user", "content": f"sort:{text}"}]
        prompt = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        rows.append(tokenizer.encode(prompt + "".join(sorted(text)) + SPECIALS[2], add_special_tokens=False))
    data = torch.tensor(rows)  # all strings have one length: no padding
    answer = slice(data.shape[1] - letters - 1, None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0, betas=(0.9, 0.95))

    def logprobs(batch: torch.Tensor) -> torch.Tensor:
        logits = model(batch).logits[:, :-1].log_softmax(-1)
        return logits.gather(2, batch[:, 1:, None])[:, :, 0][:, answer.start - 1 :]

    probe = data[torch.randperm(len(data))[:128]]
    for step in range(1000):
        batch = data[torch.tensor(random.choices(range(len(data)), k=64))]
        loss = F.nll_loss(logprobs(batch).reshape(-1, 1), torch.zeros(64 * (letters + 1), dtype=torch.long))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step > 20:
            with torch.no_grad():
                if logprobs(probe).sum(1).exp().mean().item() >= until:
                    return logprobs(data).sum(1).exp().mean().item()
    raise SystemExit(f"the warm start did not get to {until} within 1000 steps: try another --seed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "model")
    parser.add_argument("--letters", type=int, default=3)
    parser.add_argument("--until", type=float, default=0.12, help="share of right answers to stop at")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--force", action="store_true", help="make it anew")
    args = parser.parse_args()
    if args.output.exists() and not args.force:
        print(f"{args.output} is there already (--force makes it anew)")
        return
    disable_progress_bar()
    random.seed(args.seed)
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    tokenizer = make_tokenizer()
    model = make_policy(tokenizer)
    exact = warm_start(model, tokenizer, args.letters, args.until)
    unfinished = args.output.with_name(args.output.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    shutil.rmtree(args.output, ignore_errors=True)
    unfinished.rename(args.output)
    print(f"wrote {args.output}: {model.num_parameters():,} parameters, sorts {exact:.0%} of all strings")


if __name__ == "__main__":
    main()
