// What a visitor chose. The key and the settings live as long as the tab, the theme longer.

import { byId } from "./elements.js";

const KEY = "fledge-key";
const SETTINGS = "fledge-settings";
const THEME = "fledge-theme";
const THEMES = ["system", "light", "dark"];
const NUMBERS = ["temperature", "top_p", "max_tokens", "seed"];
const SHORT = { temperature: "temperature", top_p: "top-p", max_tokens: "at most", seed: "seed" };

/** Storage may be forbidden: then nothing is kept, and everything else works. */
function read(storage, name) {
  try {
    return window[storage].getItem(name);
  } catch {
    return null;
  }
}

function write(storage, name, value) {
  try {
    if (value) window[storage].setItem(name, value);
    else window[storage].removeItem(name);
  } catch {
    // Not kept.
  }
}

let key = read("sessionStorage", KEY) ?? "";

export function readKey() {
  return key;
}

export function keepKey(value) {
  key = value.trim();
  write("sessionStorage", KEY, key);
}

export class Settings {
  constructor() {
    this.values = { max_tokens: "512" };
    try {
      Object.assign(this.values, JSON.parse(read("sessionStorage", SETTINGS) ?? "{}"));
    } catch {
      // Whatever was there is of no use.
    }
    byId("settings-form").addEventListener("submit", () => this.#keep());
    this.#summarise();
  }

  /** Fill the form with what is in force. */
  show() {
    for (const name of [...NUMBERS, "system"]) byId(name).value = this.values[name] ?? "";
  }

  #keep() {
    for (const name of [...NUMBERS, "system"]) this.values[name] = byId(name).value.trim();
    write("sessionStorage", SETTINGS, JSON.stringify(this.values));
    this.#summarise();
  }

  #summarise() {
    const parts = NUMBERS.filter((name) => this.values[name]).map((name) => {
      const unit = name === "max_tokens" ? " tokens" : "";
      return `${SHORT[name]} ${this.values[name]}${unit}`;
    });
    if (this.values.system) parts.unshift("system prompt");
    byId("chosen").textContent = parts.join(" · ");
  }

  get system() {
    return this.values.system ?? "";
  }

  /** The parameters of a request; what is empty is left to the target. */
  get parameters() {
    const given = NUMBERS.filter((name) => this.values[name]);
    return Object.fromEntries(given.map((name) => [name, Number(this.values[name])]));
  }
}

/** The button that goes round system, light and dark. */
export function installTheme(button) {
  let theme = read("localStorage", THEME) ?? "system";
  const show = () => {
    if (theme === "system") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    button.textContent = { system: "◐ Auto", light: "☀ Light", dark: "☾ Dark" }[theme];
    button.setAttribute("aria-label", `Theme: ${theme === "system" ? "as the system" : theme}`);
  };
  if (!THEMES.includes(theme)) theme = "system";
  show();
  button.addEventListener("click", () => {
    theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
    write("localStorage", THEME, theme === "system" ? "" : theme);
    show();
  });
}
