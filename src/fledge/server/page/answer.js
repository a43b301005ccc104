// One answer as it arrives: tokens in the colour of their origin, code in blocks, figures below.
//
// Text of the model only ever becomes text nodes. A token without text belongs to the character, or
// tag, that a later one completes: they are shown as one, drafted only if all of them were.

import { element } from "./elements.js";

const DEEPEST_SHADE = 4;
const FENCE = /^\s{0,3}(`{3,}|~{3,})\s*([\w+#.-]*)[^`]*$/;

/** Text with origins, line by line; a line that opens or closes a code block is known at its end. */
class TokenText {
  constructor(place) {
    this.place = place;
    this.place.classList.add("tokens");
    this.fence = null;
    this.line = "";
    this.lineSpans = [];
    this.isPassStart = true;
    this.block = null;
  }

  add(text, depths) {
    const isDrafted = depths.every((depth) => depth > 0);
    const lines = text.split("\n");
    lines.forEach((part, number) => {
      const isLast = number === lines.length - 1;
      if (part || !isLast) this.#append(part + (isLast ? "" : "\n"), depths, isDrafted);
      this.line += part;
      if (!isLast) this.#endLine();
    });
    this.isPassStart = depths.at(-1) === 0;
  }

  finish() {
    if (this.fence && FENCE.test(this.line)) this.#endLine();
  }

  #append(text, depths, isDrafted) {
    const span = element("span", { class: `token ${isDrafted ? "drafted" : "own"}` }, text);
    span.dataset.depths = depths.join(" ");
    if (isDrafted) span.dataset.depth = Math.min(Math.max(...depths), DEEPEST_SHADE);
    if (this.isPassStart) span.classList.add("first");
    this.#current().append(span);
    this.lineSpans.push(span);
  }

  #current() {
    if (!this.block) {
      const isCode = this.fence !== null;
      this.block = element(isCode ? "code" : "p", {});
      if (isCode) {
        const lines = element("pre", { tabindex: "0" }, this.block);
        if (this.fence.language) lines.dataset.language = this.fence.language;
        this.place.append(lines);
      } else {
        this.place.append(this.block);
      }
    }
    return this.block;
  }

  #endLine() {
    const match = FENCE.exec(this.line);
    const closes = match && this.fence && match[1].startsWith(this.fence.mark) && !match[2];
    if (match && (closes || !this.fence)) {
      const block = this.#current();
      this.lineSpans.forEach((span) => span.remove());
      if (!block.hasChildNodes()) (this.fence ? block.parentNode : block).remove();
      this.fence = closes ? null : { mark: match[1], language: match[2] };
      this.block = null;
    }
    this.line = "";
    this.lineSpans = [];
  }
}

/** An answer in the conversation. */
export class Answer {
  constructor(title) {
    this.text = "";
    this.reasoning = "";
    this.numDrafted = 0;
    this.numTokens = 0;
    this.figures = null;
    this.usage = null;
    this.finishReason = null;
    this.body = element("div", { class: "body" });
    this.footer = element("p", { class: "figures-line" });
    this.root = element(
      "article",
      { class: "message assistant", "aria-busy": "true", "aria-label": title },
      element("h3", { class: "who" }, title),
      this.body,
      this.footer,
    );
    this.waiting = element("span", { class: "waiting" }, "reading");
    this.body.append(this.waiting);
    this.content = null;
    this.thought = null;
    this.pending = [];
    this.started = performance.now();
  }

  /** Take one chunk of the stream; returns the text that came with it. */
  take(chunk) {
    if (chunk.usage) this.usage = chunk.usage;
    if (chunk.fledge) this.figures = chunk.fledge;
    const choice = chunk.choices[0];
    if (!choice) return "";
    if (choice.finish_reason) this.finishReason = choice.finish_reason;
    const before = this.text.length;
    for (const token of choice.tokens ?? []) this.#addToken(token);
    this.#showProgress();
    return this.text.slice(before);
  }

  #addToken(token) {
    this.numTokens += 1;
    this.numDrafted += token.draft_depth > 0;
    this.pending.push(token.draft_depth);
    if (!token.text && !token.reasoning) return;
    this.waiting.remove();
    if (token.reasoning) {
      this.reasoning += token.reasoning;
      this.#thought().add(token.reasoning, this.pending);
    }
    if (token.text) {
      this.text += token.text;
      this.#content().add(token.text, this.pending);
    }
    this.pending = [];
  }

  #content() {
    if (!this.content) {
      const place = element("div", {});
      this.body.append(place);
      this.content = new TokenText(place);
    }
    return this.content;
  }

  #thought() {
    if (!this.thought) {
      const place = element("div", {});
      this.body.prepend(
        element("details", { class: "thought" }, element("summary", {}, "Reasoning"), place),
      );
      this.thought = new TokenText(place);
    }
    return this.thought;
  }

  #showProgress() {
    const seconds = (performance.now() - this.started) / 1000;
    this.footer.textContent = `${this.numTokens} tokens, ${seconds.toFixed(1)} s`;
  }

  /** The stream is over: `note` says how, unless it ended as it should or that is said elsewhere. */
  finish(note = null) {
    this.waiting.remove();
    this.content?.finish();
    this.root.setAttribute("aria-busy", "false");
    if (!this.text && !this.reasoning) note ??= "The target had nothing to say.";
    const parts = this.figures ? this.#figureParts() : [];
    if (this.finishReason === "length") parts.push("cut at the longest allowed");
    this.footer.replaceChildren(...parts.map((part) => element("span", {}, part)));
    if (note) this.footer.append(element("span", { class: "ended" }, note));
  }

  #figureParts() {
    const { accept_length: accept, cycles } = this.figures;
    const parts = [];
    if (accept !== null) parts.push(element("b", {}, `${accept.toFixed(2)} tokens a pass`));
    if (this.rate !== null) parts.push(`${format(this.rate)} tokens/s`);
    parts.push(`${this.count} tokens in ${cycles + 1} passes`);
    if (this.numDrafted) parts.push(`${Math.round((100 * this.numDrafted) / this.count)}% drafted`);
    parts.push(`first after ${Math.round(1000 * this.figures.time_to_first_token_s)} ms`);
    return parts;
  }

  get count() {
    return this.usage?.completion_tokens ?? this.numTokens;
  }

  /** Tokens per second after the first: reading the prompt does not count. */
  get rate() {
    const { tokens_per_s: overall, time_to_first_token_s: first, queue_s: queue } = this.figures ?? {};
    if (!overall || this.count < 2) return null;
    const seconds = this.count / overall - (first - queue);
    return seconds > 0 ? (this.count - 1) / seconds : null;
  }
}

export function format(number) {
  return number >= 100 ? Math.round(number).toString() : number.toFixed(1);
}

/** What a token is, in words; asked for when somebody points at it. */
export function explain(span) {
  const depths = span.dataset.depths?.split(" ").map(Number) ?? [];
  const words = depths.map((depth) => (depth ? `drafted at depth ${depth}, accepted` : "the target's own"));
  return depths.length > 1 ? `${depths.length} tokens: ${words.join("; ")}` : (words[0] ?? "");
}
