"""Makes tokenizer.json: ids that Hugging Face's tokenizers gives for the vocabulary of the bundled model (and, where it is
present, for the Qwen vocabulary of the reference collection), with the pre-tokenizers of the published tokenizer.json files.

Run with tokenizers 0.23.3 and gguf in this directory.
"""

import json
import os

from gguf import GGUFReader
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

HEAD = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?"
TAIL = r"+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PRE = {
    "qwen35": (HEAD + r"[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]" + TAIL, True, False),
    "qwen2": (HEAD + r"\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]" + TAIL, True, False),
    "llama-bpe": (HEAD + r"\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]" + TAIL, False, True),
}


def build(path, pre):
    fields = GGUFReader(path).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    types = fields["tokenizer.ggml.token_type"].contents()
    merges = fields["tokenizer.ggml.merges"].contents()
    pattern, nfc, ignore_merges = PRE[pre]
    vocab = {token: id for id, token in enumerate(tokens) if types[id] == 1}
    tokenizer = Tokenizer(models.BPE(vocab, [tuple(merge.split(" ")) for merge in merges], ignore_merges=ignore_merges))
    if nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(pattern), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])
    special = [AddedToken(token, special=types[id] == 3, normalized=False) for id, token in enumerate(tokens) if types[id] in (3, 4)]
    # Special tokens end the vocabulary, so they get the ids they have in the file.
    tokenizer.add_tokens(special)
    assert all(tokenizer.token_to_id(token.content) == tokens.index(token.content) for token in special)
    return tokenizer


texts = [
    "",
    " ",
    "Hello world",
    "Hello, y'all! I'll SAY'LL we'Ve 'tis 'S 's",
    "  two  spaces   and\ttabs\t\tand \n newlines\n\n\n  x\r\n\r\n",
    "1 12 123 1234 12345 3.14 ½ Ⅷ ٣٤٥ ²",
    "cafe\u0301 café e\u0323\u0301 a\u0300\u0300 \u0301x",
    "हिन्दी में ไทยภาษา Tiếng Việt Tie\u0302\u0301ng Vie\u0323\u0302t",
    "日本語 中文 한국어 \u1112\u1161\u11ab が か\u3099 \ufb01 Å \u212b \u2126",
    "😀 👍🏽 👨\u200d👩\u200d👧 🇩🇪 ✅",
    "عربى עִבְרִית Ελληνικά Привет",
    "def f(x):\n    return x ** 2  # comment\n",
    "!!!??? ... --- \"quoted\" (parens) [a] {b} <c>\n!",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\nso\n</think>\n\nyes<|im_end|><|endoftext|>",
    "<think><tool_call></tool_call></think> <|im_start <|im_end|>> a<think>b",
    "e\u0301<think>\u0301e",
    "\u00a0\u2003\u3000x\u200b\ufeff\u0000\u0001\u001f\u007f\u0085y",
    "'ſ 'K \u017f",
    "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx thethethethe  \n \n  \n",
    "\U0010ffff\ufdd0\ufffd\ue000",
]

here = os.path.dirname(os.path.abspath(__file__))
tiny = os.path.join(here, "../../../models/tiny-qwen35moe-Q4_K_M.gguf")
qwen = os.path.join(here, "../../../../shared/vocab/ggml-vocab-qwen35.gguf")
golden = {"texts": texts, "tiny": {}}
for pre in PRE:
    tokenizer = build(tiny, pre)
    golden["tiny"][pre] = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
if os.path.exists(qwen):
    tokenizer = build(qwen, "qwen35")
    golden["qwen35"] = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
with open("tokenizer.json", "w", encoding="utf-8") as file:
    lists = json.dumps(golden, ensure_ascii=True).replace("]], ", "]],\n").replace("], [", "],\n[").replace('", "', '",\n"')
    file.write(lists + "\n")
