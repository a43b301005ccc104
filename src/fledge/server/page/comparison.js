// The same prompt with and without the head, one after the other so that neither slows the other.

import { Answer, format } from "./answer.js";
import { element } from "./elements.js";

export class Comparison {
  constructor() {
    this.withHead = new Answer("With the head");
    this.plain = new Answer("Plain decoding");
    this.plain.waiting.textContent = "waits for the other";
    this.plain.waiting.classList.add("still");
    this.verdict = element("div", { class: "verdict" });
    this.root = element(
      "section",
      { class: "comparison", "aria-label": "With and without the head" },
      element("div", { class: "columns" }, this.withHead.root, this.plain.root),
      this.verdict,
    );
  }

  beginPlain() {
    this.plain.waiting.textContent = "reading";
    this.plain.waiting.classList.remove("still");
    this.plain.started = performance.now();
  }

  /** A plain statement whether the texts are the same, and how the speeds compare. */
  conclude() {
    const place = differenceOf(this.withHead, this.plain);
    const isSame = place === null;
    const statement = isSame
      ? `The texts are identical: ${this.withHead.text.length} characters, ${this.withHead.count} tokens.`
      : `The texts differ from character ${place + 1} on.`;
    this.verdict.dataset.same = String(isSame);
    this.verdict.replaceChildren(element("p", { class: "statement" }, statement));
    if (!isSame) this.verdict.append(element("p", { class: "fine" }, WHY_DIFFERENT));
    const [fast, plain] = [this.withHead.rate, this.plain.rate];
    if (fast && plain) this.verdict.append(...speeds(fast, plain));
    return statement;
  }
}

const WHY_DIFFERENT =
  "In half precision two tokens may be so close that rounding decides between them; in float32 " +
  "the texts are the same.";

/** Where two answers part; null when they do not. */
function differenceOf(one, other) {
  for (const part of ["reasoning", "text"]) {
    const [a, b] = [one[part], other[part]];
    if (a === b) continue;
    let place = 0;
    while (a[place] === b[place]) place += 1;
    return place;
  }
  return null;
}

function speeds(fast, plain) {
  const ratio = fast / plain;
  const most = Math.max(fast, plain);
  const row = (name, rate, kind) => {
    const bar = element("span", { class: `speed-bar ${kind}` });
    bar.style.inlineSize = `${(100 * rate) / most}%`;
    const track = element("dd", { class: "track", "aria-hidden": "true" }, bar);
    return element("div", {}, element("dt", {}, name), track, element("dd", {}, `${format(rate)} tokens/s`));
  };
  const words =
    ratio >= 1.05
      ? `${ratio.toFixed(2)} times as fast with the head`
      : ratio > 0.95
        ? "about as fast with the head as without"
        : `${(1 / ratio).toFixed(2)} times slower with the head`;
  return [
    element("p", { class: "ratio" }, words),
    element("dl", { class: "speeds" }, row("With", fast, "drafted"), row("Plain", plain, "own")),
  ];
}
