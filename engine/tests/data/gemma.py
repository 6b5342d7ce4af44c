"""Makes gemma.json: ids that Hugging Face's tokenizers gives for the vocabulary of the bundled Gemma 4 model and, where it is
present, for the published one of the reference collection, with the normalizer and model of Gemma 4's tokenizer.json.

Run with tokenizers 0.23.3 and gguf in this directory.
"""

import json
import os

from gguf import GGUFReader
from tokenizers import AddedToken, Tokenizer, models, normalizers


def build(path):
    fields = GGUFReader(path).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    types = fields["tokenizer.ggml.token_type"].contents()
    merges = fields["tokenizer.ggml.merges"].contents()
    vocab = {token: id for id, token in enumerate(tokens)}
    pairs = [tuple(merge.split(" ")) for merge in merges]
    model = models.BPE(vocab, pairs, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.add_tokens([
        AddedToken(token, special=True, normalized=False) for token, type in zip(tokens, types) if type in (3, 4)
    ])
    return tokenizer


texts = [
    "",
    " ",
    "Hello world! Café déjà vu — 123 😊",
    " leading, trailing  and   many    spaces ",
    "\n\n\n",
    "\n" * 17,
    "\n" * 31,
    "\n" * 32,
    "\n" * 70,
    "a\n\nb\n \n\n\t\n c\r\n\r\nd\n\te",
    "\t\t\tx\t y\t\t",
    " " * 31,
    " " * 64 + "x",
    "1 12 123 12345 3.14",
    "cafe\u0301 Tie\u0302\u0301ng Việt हिन्दी ไทย 한국어 日本語",
    "😀 👍🏽 👨\u200d👩\u200d👧 🇩🇪 ✅",
    "\u0000\u0001\u001f\u007f\u0085\u00a0\u2003\u3000\ufeff\ufdd0\ufffd\ue000\U0010ffff",
    "<0x41> <0x0A> <unused0> [multimodal] ▁under▁",
    "<bos><|turn>user\nHi <|image|> there<turn|>\n<|turn>model\n<|channel>thought\n<channel|>",
    "<|tool_call>call:f{x:<|\"|>a b<|\"|>}<tool_call|> <|turn <turn|>> <|\"",
    "thethethethe xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx \"quoted\" <b>&amp;</b>",
    "def f(x):\n    return x ** 2  # comment\n\n\n    def g():\n\tpass\n",
]

here = os.path.dirname(os.path.abspath(__file__))
tiny = os.path.join(here, "../../../models/tiny-gemma4-Q4_K_M.gguf")
published = os.path.join(here, "../../../../shared/vocab/ggml-vocab-gemma-4.gguf")
golden = {"texts": texts}
for name, path in [("tiny", tiny), ("published", published)]:
    if os.path.exists(path):
        tokenizer = build(path)
        golden[name] = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
if __name__ == "__main__":
    with open("gemma.json", "w", encoding="utf-8") as file:
        lists = json.dumps(golden, ensure_ascii=True).replace("]], ", "]],\n").replace("], [", "],\n[").replace('", "', '",\n"')
        file.write(lists + "\n")
