// Reads an answer to people who do not see it: whole sentences, and not too often.

const SENTENCE = /[\s\S]*[.!?:;\n](?=\s|$)/;
const PAUSE_MS = 1500;

export class Announcer {
  constructor(place) {
    this.place = place;
    this.held = "";
    this.last = 0;
  }

  add(text) {
    this.held += text;
    const [sentences] = SENTENCE.exec(this.held) ?? [];
    if (sentences && performance.now() - this.last > PAUSE_MS) {
      this.#say(sentences);
      this.held = this.held.slice(sentences.length);
    }
  }

  /** The rest, and what there is to say about it. */
  finish(note) {
    this.#say(`${this.held} ${note}`.trim());
    this.held = "";
  }

  #say(text) {
    this.last = performance.now();
    this.place.textContent = text;
  }
}
