"""Makes a model directory that SGLang serves with random weights (`--load-format dummy`).

Usage: make.py DIRECTORY

A Qwen2 configuration of two layers, a byte-level BPE tokenizer of a few hundred tokens and the chat template beside
this file. As in the Qwen3 models, the tags of reasoning and tool calls are single tokens that stay in the text.
"""

import json
import pathlib
import sys

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TAGS = ["<tool_call>", "</tool_call>", "<think>", "</think>"]
CORPUS = [
    "You are a helpful assistant. The capital city of France is Paris. " * 3,
    "system user assistant tool function arguments name parameters description",
    "Now compare the two results and write a short summary of the research.",
]
CONTEXT = 8192  # tokens


def tokenizer():
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.train_from_iterator(
        CORPUS * 20,
        trainers.BpeTrainer(
            vocab_size=1000,
            special_tokens=CONTROL,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    made.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    return made


def main(directory):
    directory.mkdir(parents=True, exist_ok=True)
    tokens = tokenizer()
    end, pad = tokens.token_to_id("<|im_end|>"), tokens.token_to_id("<|endoftext|>")

    def write(name, value):
        (directory / name).write_text(json.dumps(value, indent=1))

    tokens.save(str(directory / "tokenizer.json"))
    write(
        "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
            "model_max_length": CONTEXT,
            "clean_up_tokenization_spaces": False,
            "chat_template": pathlib.Path(__file__).with_name("chat.jinja").read_text(),
        },
    )
    write(
        "config.json",
        {
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "vocab_size": 1024,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": CONTEXT,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "bos_token_id": pad,
            "eos_token_id": end,
            "use_cache": True,
            "initializer_range": 0.02,
            "attention_dropout": 0.0,
            "use_sliding_window": False,
        },
    )
    write("generation_config.json", {"eos_token_id": end, "temperature": 1.0})


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
