// The page: takes what is typed, shows what is answered, says what is wrong.

import { Announcer } from "./announcer.js";
import { Answer, explain } from "./answer.js";
import { Client } from "./client.js";
import { Comparison } from "./comparison.js";
import { byId, element } from "./elements.js";
import { Monitor } from "./figures.js";
import { installTheme, keepKey, readKey, Settings } from "./preferences.js";

const STARTERS = [
  "Tell me a short story about a crow who learns to wait.",
  "Write a Python function that reverses a linked list.",
  "Why is the sky blue? Explain it to a child.",
];
const MAX_RETRIES = 3;
const STATES = {
  ready: "ready",
  loading: "loading",
  restarting: "restarting",
  draining: "shutting down",
  failed: "failed",
  stopped: "stopped",
  locked: "key needed",
  gone: "no answer",
};
const BANNERS = {
  loading: "The engine is loading the target. It will answer as soon as it is ready.",
  restarting: "The engine stopped and is being started again. What was running has to be asked again.",
  draining: "The server is shutting down and takes no new questions.",
  failed: "The engine could not be loaded; the server's log says why.",
  gone: "The server does not answer. Trying again every second.",
};

const client = new Client(readKey);
const settings = new Settings();
const announcer = new Announcer(byId("announcer"));
const scroll = byId("scroll");
const prompt = byId("prompt");
let history = [];
let model = null;
let running = null;

const monitor = new Monitor(client, (state, failure) => {
  byId("state").dataset.state = state;
  byId("state-text").textContent = STATES[state] ?? state;
  showBanner(BANNERS[state] ?? null);
  byId("compare-label").hidden = monitor.hasHead === false;
  byId("legend").classList.toggle("headless", monitor.hasHead === false);
  if (state === "locked") askForKey(failure.message);
  else if (state !== "gone" && !model) findModel();
});

async function findModel() {
  try {
    model = (await client.get("/v1/models")).data[0].id;
    byId("model").textContent = model;
    document.title = `${model} · fledge`;
  } catch {
    // The monitor says what is wrong, and asks again.
  }
}

function showBanner(text) {
  const banner = byId("banner");
  if (banner.textContent !== (text ?? "")) banner.textContent = text ?? "";
  banner.hidden = !text;
}

// --- asking -------------------------------------------------------------------------------------

function send(text) {
  if (running || !text.trim()) return;
  byId("welcome").hidden = true;
  byId("log").append(
    element(
      "article",
      { class: "message user" },
      element("h3", { class: "who" }, "You"),
      element("div", { class: "body" }, text),
    ),
  );
  answer(text);
}

async function answer(text) {
  running = new AbortController();
  showRunning(true);
  // Whoever begins a new chat leaves this one as it is.
  const conversation = history;
  const isComparison = byId("compare").checked && monitor.hasHead === true;
  const turn = isComparison ? new Comparison() : new Answer(model ?? "Answer");
  byId("log").append(turn.root);
  scroll.scrollTop = scroll.scrollHeight;
  const first = isComparison ? turn.withHead : turn;
  try {
    if (!model) await findModel();
    const body = makeBody(text);
    await stream(first, body);
    let note = `Answer finished: ${first.count} tokens.`;
    if (isComparison) {
      turn.beginPlain();
      await stream(turn.plain, { ...body, speculation: false });
      note = keepingPlace(() => turn.conclude());
    }
    announcer.finish(note);
  } catch (failure) {
    end(turn, first, failure, text);
  }
  if (first.text) {
    conversation.push({ role: "user", content: text }, { role: "assistant", content: first.text });
  }
  running = null;
  showRunning(false);
  monitor.look();
}

function makeBody(text) {
  const system = settings.system ? [{ role: "system", content: settings.system }] : [];
  return {
    model,
    messages: [...system, ...history, { role: "user", content: text }],
    stream: true,
    stream_options: { include_usage: true },
    return_draft_depths: true,
    // Both sides of a comparison need the same one.
    seed: Math.floor(Math.random() * 2 ** 31),
    ...settings.parameters,
  };
}

/** One answer, with patience for a server that is full or not there yet. */
async function stream(shown, body) {
  for (let attempt = 0; ; attempt += 1) {
    try {
      shown.started = performance.now();
      for await (const chunk of client.chat(body, running.signal)) {
        announcer.add(keepingPlace(() => shown.take(chunk)));
      }
      keepingPlace(() => shown.finish());
      return;
    } catch (failure) {
      const mayRetry = failure.retryAfterS !== null && failure.retryAfterS !== undefined;
      if (!mayRetry || shown.numTokens || attempt >= MAX_RETRIES) throw failure;
      await countDown(shown, failure);
    }
  }
}

async function countDown(shown, failure) {
  const why = failure.status === 429 ? "The server is full" : "The engine is not ready";
  for (let left = Math.max(1, failure.retryAfterS); left > 0; left -= 1) {
    shown.waiting.textContent = `${why}; asking again in ${left} s`;
    await new Promise((resolve, reject) => {
      const timer = setTimeout(resolve, 1000);
      const onStop = () => {
        clearTimeout(timer);
        reject(new DOMException("stopped", "AbortError"));
      };
      running.signal.addEventListener("abort", onStop, { once: true });
    });
  }
  shown.waiting.textContent = "asking again";
}

/** An answer that did not end as it should. */
function end(turn, first, failure, text) {
  const wasStopped = failure.name === "AbortError";
  const answers = turn === first ? [first] : [turn.withHead, turn.plain];
  for (const one of answers) {
    if (one.root.getAttribute("aria-busy") === "true") one.finish(wasStopped ? "stopped" : "");
  }
  if (wasStopped) {
    announcer.finish("Stopped.");
    return;
  }
  if (failure.status === 401) {
    wasDismissed = null;
    askForKey(failure.message);
  }
  const again = element("button", { type: "button", class: "quiet" }, "Ask again");
  again.addEventListener("click", () => {
    if (running) return;
    turn.root.remove();
    if (first.text) history.splice(-2);
    answer(text);
  });
  turn.root.append(
    element("div", { class: "failure", role: "alert" }, element("p", {}, sentence(failure)), again),
  );
  scroll.scrollTop = scroll.scrollHeight;
}

function sentence(failure) {
  const text = String(failure.message || failure);
  const whole = `${text[0].toUpperCase()}${text.slice(1)}`;
  return /[.!?]$/.test(whole) ? whole : `${whole}.`;
}

/** Do something that makes the conversation longer; whoever reads at its end stays there. */
function keepingPlace(change) {
  const isAtEnd = scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < 60;
  const result = change();
  if (isAtEnd) scroll.scrollTop = scroll.scrollHeight;
  return result;
}

function showRunning(isRunning) {
  const hadFocus = document.activeElement;
  byId("send").hidden = isRunning;
  byId("stop").hidden = !isRunning;
  // A button that vanishes must not take the keyboard's place with it.
  if (hadFocus === byId("send") || hadFocus === byId("stop")) prompt.focus();
}

function stop() {
  running?.abort();
}

// --- the rest of the page -----------------------------------------------------------------------

function askForKey(why) {
  const dialog = byId("key-dialog");
  if (dialog.open) return;
  if (why && !readKey()) byId("key-why").textContent = KEY_WHY;
  else if (why) byId("key-why").textContent = `${sentence({ message: why })} Give another one.`;
  byId("key").value = "";
  if (why && wasDismissed === readKey()) return;
  dialog.returnValue = "";
  dialog.showModal();
}

const KEY_WHY =
  "This server wants an API key. It is kept in this tab until it is closed, and sent to this server only.";
let wasDismissed = null;

function grow() {
  prompt.style.blockSize = "auto";
  prompt.style.blockSize = `${Math.min(prompt.scrollHeight + 2, 220)}px`;
}

function showFigures(isOpen) {
  document.body.classList.toggle("figures-open", isOpen);
  byId("open-figures").setAttribute("aria-expanded", String(isOpen));
  (isOpen ? byId("close-figures") : byId("open-figures")).focus();
}

function install() {
  installTheme(byId("theme"));
  for (const text of STARTERS) {
    const starter = element("button", { type: "button", class: "starter" }, text);
    starter.addEventListener("click", () => send(text));
    byId("starters").append(starter);
  }
  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    if (running || !prompt.value.trim()) return;
    const text = prompt.value;
    prompt.value = "";
    grow();
    send(text);
  });
  prompt.addEventListener("input", grow);
  prompt.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    byId("composer").requestSubmit();
  });
  byId("stop").addEventListener("click", stop);
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || document.querySelector("dialog[open]")) return;
    if (document.body.classList.contains("figures-open")) showFigures(false);
    else stop();
  });
  byId("new-chat").addEventListener("click", () => {
    stop();
    history = [];
    byId("log").replaceChildren();
    byId("welcome").hidden = false;
    prompt.focus();
  });
  byId("show-origins").addEventListener("change", (event) => {
    document.body.classList.toggle("no-origins", !event.target.checked);
  });
  byId("log").addEventListener("pointerover", (event) => {
    const token = event.target.closest(".token");
    if (token && !token.title) token.title = explain(token);
  });
  byId("open-figures").addEventListener("click", () => showFigures(true));
  byId("close-figures").addEventListener("click", () => showFigures(false));
  installDialogs();
  monitor.look();
  prompt.focus({ preventScroll: true });
}

function installDialogs() {
  byId("open-settings").addEventListener("click", () => {
    settings.show();
    byId("settings-dialog").showModal();
  });
  byId("open-key").addEventListener("click", () => {
    wasDismissed = null;
    askForKey(null);
  });
  byId("key-form").addEventListener("submit", () => {
    wasDismissed = null;
    keepKey(byId("key").value);
    monitor.look();
  });
  // Closed without a key, the dialog does not come back by itself.
  byId("key-dialog").addEventListener("close", () => {
    if (byId("key-dialog").returnValue !== "given") wasDismissed = readKey();
    prompt.focus();
  });
  for (const dialog of document.querySelectorAll("dialog")) {
    dialog.querySelector("[data-close]").addEventListener("click", () => dialog.close(""));
  }
}

install();
