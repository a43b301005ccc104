"""A target of six letters and a head that offers all of them: every draft is accepted.

Nothing of it is learnt. Of the target's output matrix only six rows are not zero, three and their
opposites, so one of the six letters always wins; the head may say no others, and its trees hold
every pair of them.
"""

from pathlib import Path

import torch

from fledge import EngineSettings, TreeSettings
from fledge.models.head import Eagle3Head
from fledge.models.head_files import save_head
from fledge.models.target import Target
from fledge.testing import target_of, tiny_head, tiny_model, tiny_tokenizer

LETTERS = "aeno \n"
EVERY_PAIR = EngineSettings(
    tree=TreeSettings(depth=2, width=6, budget=42),
    controller="fixed",
    max_requests=2,
    cache_tokens=8192,
)
TOKENS_PER_PASS = 3


def save_six_letters(directory: Path, *, seed: int = 0) -> tuple[Path, Path]:
    """The target and its head."""
    tokenizer = tiny_tokenizer()
    model = tiny_model(
        vocab_size=len(tokenizer), max_position_embeddings=8192, eos_token_id=None, seed=seed
    )
    ids = torch.tensor([tokenizer(letter)["input_ids"][0] for letter in LETTERS])
    with torch.no_grad():
        rows = model.lm_head.weight[ids[:3]].clone()
        model.lm_head.weight.zero_()
        model.lm_head.weight[ids] = torch.cat([rows, -rows])
    model.save_pretrained(directory / "six-letters")
    tokenizer.save_pretrained(directory / "six-letters")
    save_head(_head_for(target_of(model), ids), directory / "head")
    return directory / "six-letters", directory / "head"


def _head_for(target: Target, ids: torch.Tensor) -> Eagle3Head:
    drawn = tiny_head(target, draft_vocab_size=len(ids))
    head = Eagle3Head(drawn.config, ids.sort().values)
    weights = dict(drawn.named_parameters())
    for name, parameter in head.named_parameters():
        parameter.data.copy_(weights[name])
    return head.eval()


CONTRAST = """() => {
  const parts = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const light = (colour) => {
    const [r, g, b] = parts(colour).map((v) => {
      const s = v / 255;
      return s <= 0.04045 ? s / 12.92 : ((s + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ratio = (one, other) => {
    const [a, b] = [light(one), light(other)].sort((x, y) => y - x);
    return (a + 0.05) / (b + 0.05);
  };
  const behind = (node) => {
    for (; node; node = node.parentElement) {
      const colour = getComputedStyle(node).backgroundColor;
      if (parts(colour).at(3) !== 0) return colour;
    }
  };
  const text = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const found = [];
  while (text.nextNode()) {
    const node = text.currentNode.parentElement;
    if (!text.currentNode.data.trim() || !node.checkVisibility()) continue;
    const style = getComputedStyle(node);
    found.push([ratio(style.color, behind(node)), `${node.className}: ${text.currentNode.data}`]);
    if (node.matches(".token")) {
      const line = ratio(style.textDecorationColor, behind(node));
      found.push([1.5 * line, `line of ${node.className}`]);
    }
  }
  return found;
}"""
"""How far every text on the page, and every line below a token, stands out from what is behind it.

Text has to reach 4.5; a line, which only has to reach 3, is weighed accordingly.
"""
