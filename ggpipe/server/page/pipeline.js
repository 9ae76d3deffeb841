// The pipeline next to the chat: a bar for each rank, tokens by origin, and the figures of the terminal's panel.

import { originClass } from "./conversation.js";
import { bytes, h, iconButton, percent, rate, seconds } from "./dom.js";

const COLUMNS = 60;
const COLUMN_MS = 1000;
const STATES = {
  ok: "ready", loading: "loading", restarting: "restarting", stopping: "shutting down", away: "no connection", closed: "needs a key",
};

export class Pipeline {
  #ranks = new Map();
  #hosts = new Map();
  #columns = []; // tokens of each second: `{at, own, drafted}`
  #before = null;

  /** `on.colours(areColoured)`: whether to colour the output; `on.close()`. */
  constructor(place, strip, on, areColoured) {
    this.state = h("span", { class: "state", role: "status" });
    this.model = h("p", { class: "model" });
    this.speed = h("span", { class: "speed" }, "–");
    this.bars = h("div", { class: "history", role: "img", "aria-label": "Tokens per second in the last minute" });
    this.cells = Array.from({ length: COLUMNS }, () => {
      const drafted = h("i", { class: "drafted" });
      const own = h("i", { class: "own" });
      const cell = h("span", {}, drafted, own);
      this.bars.append(cell);
      return { drafted, own };
    });
    this.drafters = h("p", { class: "legend drafters", hidden: true });
    this.ranks = h("div", { class: "ranks" });
    this.figures = Object.fromEntries(
      [["ttft", "TTFT"], ["itl", "ITL"], ["acceptance", "acceptance"], ["serving", "serving"], ["cached", "cache hits"], ["restarts", "restarts"]]
        .map(([name, label]) => [name, { label, value: h("dd", {}, "–") }]),
    );
    const box = h("input", { type: "checkbox", id: "colours", onchange: () => on.colours(box.checked) });
    box.checked = areColoured;
    place.append(
      h("header", {}, h("h2", {}, "Pipeline"), this.state, iconButton("close", "Close", on.close, { class: "icon close" })),
      this.model,
      h("div", { class: "tokens" }, this.speed, this.bars, h(
        "p", { class: "legend" },
        h("span", {}, h("i", { class: "own" }), "own"), h("span", {}, h("i", { class: "drafted" }), "drafted"),
        h("label", { class: "colours" }, box, "in the text"),
      ), this.drafters),
      this.ranks,
      h("dl", {}, Object.values(this.figures).map(({ label, value }) => h("div", {}, h("dt", {}, label), value))),
      h("p", { class: "about" }, "Drafted tokens were proposed by a drafter and confirmed by the target. The output is the same without drafting."),
    );
    this.strip = strip;
    this.stripText = h("span");
    this.stripBars = h("span", { class: "mini" });
    strip.append(this.stripBars, this.stripText);
  }

  /** Show a sample of the server, or null without one. `needsKey`: an API key is missing. */
  show(sample, needsKey) {
    const state = sample ? sample.status : needsKey ? "closed" : "away";
    const isOn = state === "ok" || state === "stopping";
    this.state.className = `state ${state}`;
    const progress = sample && !isOn ? ` ${percent(sample.progress)}` : "";
    const text = `${STATES[state]}${progress}`;
    if (this.state.textContent !== text) this.state.textContent = text;
    if (!sample) {
      this.#before = null;
      this.#showRanks([], false);
      this.stripText.textContent = text;
      return;
    }
    this.model.textContent = sample.n_ctx ? `${sample.model} · context ${sample.n_ctx.toLocaleString("en")}` : sample.model;
    this.#count(sample.tokens);
    this.#showDrafters(sample.drafters ?? []);
    this.speed.textContent = rate(isOn ? sample.tokens_per_s ?? 0 : null);
    this.#showRanks(sample.ranks, isOn);
    const { requests, tokens, draft_tokens: drafts } = sample;
    this.#figure("ttft", seconds(sample.ttft_s));
    this.#figure("itl", seconds(sample.itl_s));
    this.#figure("acceptance", drafts.submitted ? percent(drafts.accepted / drafts.submitted) : "–");
    this.#figure("serving", `${requests.running} of ${requests.slots}${requests.waiting ? `, ${requests.waiting} wait` : ""}`);
    this.#figure("cached", tokens.prompt ? percent(tokens.cached / tokens.prompt) : "–");
    this.#figure("restarts", String(sample.restarts));
    const acceptance = drafts.submitted ? ` · acceptance ${percent(drafts.accepted / drafts.submitted)}` : "";
    this.stripText.textContent = isOn ? `${rate(sample.tokens_per_s ?? 0)}${acceptance}` : text;
    this.tick();
  }

  /** Move the history on as time passes. */
  tick() {
    const now = Math.floor(Date.now() / COLUMN_MS);
    this.#columns = this.#columns.filter(({ at }) => now - at < COLUMNS);
    const most = Math.max(8, ...this.#columns.map(({ own, drafted }) => own + drafted));
    const heights = new Map(this.#columns.map((column) => [now - column.at, column]));
    this.cells.forEach(({ own, drafted }, i) => {
      const column = heights.get(COLUMNS - 1 - i);
      own.style.height = `${((column?.own ?? 0) / most) * 100}%`;
      drafted.style.height = `${((column?.drafted ?? 0) / most) * 100}%`;
    });
  }

  #count(tokens) {
    const before = this.#before;
    this.#before = tokens;
    if (!before || tokens.generated < before.generated) return; // another server process
    const drafted = Math.max(tokens.drafted - before.drafted, 0);
    const own = Math.max(tokens.generated - before.generated - drafted, 0);
    if (!own && !drafted) return;
    const at = Math.floor(Date.now() / COLUMN_MS);
    const last = this.#columns.at(-1);
    if (last?.at === at) {
      last.own += own;
      last.drafted += drafted;
    } else this.#columns.push({ at, own, drafted });
  }

  /** What the colours in the text mean, if there are several drafters. */
  #showDrafters(drafters) {
    const names = drafters.length > 1 ? [...drafters, "several"] : [];
    const key = names.join();
    if (this.drafters.dataset.key === key) return;
    this.drafters.dataset.key = key;
    this.drafters.hidden = !names.length;
    this.drafters.replaceChildren(...names.map((name) => h("span", {}, h("i", { class: originClass(name) }), name)));
  }

  #figure(name, text) {
    const { value } = this.figures[name];
    if (value.textContent !== text) value.textContent = text;
  }

  #showRanks(ranks, isOn) {
    const key = JSON.stringify(ranks.map(({ rank, draft, host, layers }) => [rank, draft, host, layers]));
    if (this.ranks.dataset.key !== key) {
      this.ranks.dataset.key = key;
      this.#build(ranks);
    }
    const hosts = new Map();
    for (const rank of ranks) {
      const row = this.#ranks.get(`${rank.rank} ${rank.draft}`);
      const share = isOn ? rank.busy : rank.loaded;
      row.bar.style.width = `${share * 100}%`;
      row.meter.setAttribute("aria-valuenow", String(Math.round(share * 100)));
      row.meter.setAttribute("aria-label", isOn ? "occupied" : "loaded");
      row.meter.classList.toggle("loading", !isOn);
      row.share.textContent = percent(share);
      row.memory.textContent = rank.resident_bytes ? bytes(rank.resident_bytes) : "";
      hosts.set(rank.host, (hosts.get(rank.host) ?? 0) + rank.resident_bytes);
      row.mini.style.height = `${Math.max(share * 100, 6)}%`;
    }
    for (const [host, total] of hosts) {
      const place = this.#hosts.get(host);
      if (place) place.textContent = total ? bytes(total) : "";
    }
  }

  #build(ranks) {
    this.#ranks.clear();
    this.#hosts.clear();
    this.stripBars.replaceChildren();
    const byHost = new Map();
    for (const rank of ranks) byHost.set(rank.host, [...(byHost.get(rank.host) ?? []), rank]);
    this.ranks.replaceChildren(...[...byHost].map(([host, own]) => {
      const total = h("span");
      this.#hosts.set(host, total);
      return h("section", { "aria-label": `Machine ${host}` }, h("h3", {}, h("span", {}, host || "machine"), total), h("ul", {}, own.map((rank) => this.#row(rank))));
    }));
  }

  #row(rank) {
    const bar = h("i");
    const meter = h("div", { class: rank.draft ? "meter draft" : "meter", role: "meter", "aria-valuemin": "0", "aria-valuemax": "100" }, bar);
    const mini = h("i", { class: rank.draft ? "draft" : "" });
    const row = { bar, meter, mini, share: h("span", { class: "share" }), memory: h("span", { class: "memory" }) };
    this.#ranks.set(`${rank.rank} ${rank.draft}`, row);
    this.stripBars.append(h("span", {}, mini));
    const role = rank.draft ? `draft ${rank.rank}` : `rank ${rank.rank}`;
    const isHead = rank.rank === 0 && !rank.draft;
    const layers = rank.layers ? `layers ${rank.layers}` : "no layers";
    return h(
      "li", {},
      h("div", { class: "names" }, h("b", {}, role), isHead && h("span", { class: "role" }, "head"), h("span", { class: "layers" }, layers), row.memory),
      h("div", { class: "row" }, meter, row.share),
    );
  }
}
