// Live figures: asked for once a second while somebody may be looking.

import { format } from "./answer.js";
import { byId, element } from "./elements.js";

const INTERVAL_MS = 1000;
const NUM_SAMPLES = 60;

export class Monitor {
  /** `onState` hears "ready", "loading", "restarting", ..., "locked" or "gone" after every look. */
  constructor(client, onState) {
    this.client = client;
    this.onState = onState;
    this.hasHead = null;
    this.samples = [];
    this.last = null;
    this.timer = null;
    this.isLooking = false;
    document.addEventListener("visibilitychange", () => this.look());
  }

  /** Look now, and then regularly. */
  async look() {
    clearTimeout(this.timer);
    if (document.hidden) {
      this.#forgetSpeed();
      return;
    }
    if (this.isLooking) return;
    this.isLooking = true;
    try {
      this.#show(await this.client.get("/v1/speculation"));
    } catch (failure) {
      this.#forgetSpeed();
      byId("figures-note").hidden = failure.status !== 401;
      byId("figures-note").textContent = "The figures need the server's API key.";
      this.onState(failure.status === 401 ? "locked" : "gone", failure);
    }
    this.isLooking = false;
    this.timer = setTimeout(() => this.look(), INTERVAL_MS);
  }

  #show(document_) {
    this.hasHead = document_.head !== null;
    byId("figures-note").hidden = this.hasHead;
    byId("figures-note").textContent =
      "No head is loaded: every token is the target's own, one a pass. Start the server with --head to draft.";
    for (const id of ["accept-card", "acceptance-card", "controller-card"]) byId(id).hidden = !this.hasHead;
    this.#showEngine(document_);
    if (document_.stats && document_.engine.state === "ready") {
      this.#showLoad(document_.stats, document_.engine.facts);
      this.#showSpeed(document_.stats);
      byId("accept").textContent = document_.accept_length?.toFixed(2) ?? "–";
      showDepths(document_.stats);
      showPlan(document_.controller);
    } else {
      this.#forgetSpeed();
    }
    this.onState(document_.engine.state);
  }

  #showEngine({ target, head, engine, stats }) {
    const { facts } = engine;
    const where = facts ? `${facts.device}, ${facts.dtype}` : "–";
    byId("fact-head").textContent = head ? head.split("/").filter(Boolean).pop() : "none";
    byId("fact-head").title = head ?? "";
    byId("fact-device").textContent = where;
    byId("fact-context").textContent = facts ? `${facts.max_tokens.toLocaleString("en")} tokens` : "–";
    byId("fact-answers").textContent = stats ? stats.num_finished.toLocaleString("en") : "–";
    byId("fact-restarts").textContent = engine.restarts;
    byId("model").title = target;
  }

  #showLoad(stats, facts) {
    byId("running").textContent = `${stats.num_running} of ${facts.max_requests}`;
    byId("waiting").textContent = stats.num_waiting;
    const percent = 100 * stats.cache_usage;
    byId("cache").textContent = `${percent < 10 && percent > 0 ? percent.toFixed(1) : Math.round(percent)}%`;
    showMeter("running-meter", stats.num_running, facts.max_requests);
    showMeter("cache-meter", Math.round(percent), 100);
  }

  /** What was last heard says nothing of now. */
  #forgetSpeed() {
    this.last = null;
    byId("speed").textContent = "–";
  }

  #showSpeed(stats) {
    const now = performance.now();
    const last = this.last;
    this.last = { now, emitted: stats.num_emitted };
    // Counters that fell belong to an engine that was started again.
    if (!last || stats.num_emitted < last.emitted) return;
    const rate = (1000 * (stats.num_emitted - last.emitted)) / (now - last.now);
    byId("speed").textContent = rate ? format(rate) : "0";
    this.samples = [...this.samples, rate].slice(-NUM_SAMPLES);
    const most = Math.max(...this.samples, 1);
    const points = this.samples.map((sample, number) => {
      const x = 120 - 2 * (this.samples.length - 1 - number);
      return [x, 30 - (28 * sample) / most];
    });
    const text = points.map(([x, y]) => `${x},${y.toFixed(1)}`).join(" ");
    byId("spark-line").setAttribute("points", text);
    byId("spark-area").setAttribute("d", `M${points[0][0]},32 L${text.replaceAll(" ", " L")} L120,32 Z`);
  }
}

function showMeter(id, value, most) {
  const meter = byId(id);
  meter.setAttribute("aria-valuenow", value);
  meter.setAttribute("aria-valuemax", most);
  meter.firstElementChild.style.inlineSize = `${Math.min(100, (100 * value) / most)}%`;
}

/** One bar for each depth: of the drafts that were offered there, how many were accepted. */
function showDepths({ offered_at_depth: offered, accepted_at_depth: accepted }) {
  const list = byId("depths");
  while (list.children.length > offered.length) list.lastElementChild.remove();
  while (list.children.length < offered.length) {
    const depth = list.children.length + 1;
    const bar = element("span", { class: "bar" }, element("span", {}));
    const row = element("li", {}, element("span", { class: "depth" }), bar, element("span", { class: "share" }));
    row.firstElementChild.textContent = depth;
    row.dataset.depth = Math.min(depth, 4);
    list.append(row);
  }
  offered.forEach((number, place) => {
    const row = list.children[place];
    const percent = number ? (100 * accepted[place]) / number : 0;
    row.children[1].firstElementChild.style.inlineSize = `${percent}%`;
    row.children[2].textContent = number ? `${Math.round(percent)}%` : "–";
    row.title = `${accepted[place].toLocaleString("en")} of ${number.toLocaleString("en")} accepted at depth ${place + 1}`;
  });
  byId("depths-none").hidden = offered.length > 0;
}

function showPlan(controller) {
  const plan = controller.plan;
  byId("plan-depth").textContent = plan.depth || "none";
  byId("plan-width").textContent = plan.width || "–";
  byId("plan-nodes").textContent = plan.nodes ? `${plan.nodes}` : "0";
  const parts = [controller.controller === "fixed" ? "The same tree in every cycle, as the settings say" : controller.reason];
  if (controller.expected_gain) parts.push(`${controller.expected_gain.toFixed(2)} times plain decoding expected`);
  const text = parts.filter(Boolean).join("; ");
  byId("plan-reason").textContent = text ? `${text[0].toUpperCase()}${text.slice(1)}.` : "";
}
