// The system prompt and the sampling settings of a conversation. Empty fields use the server's settings.

import { byId, h, iconButton } from "./dom.js";

const number = (name, label, step, about) => ({ name, label, step, about });
const MAIN = [
  number("temperature", "Temperature", 0.05, "how random the output is; 0: always the most probable token"),
  number("top_p", "Top-p", 0.01, "only the most probable tokens that add up to this probability"),
  number("top_k", "Top-k", 1, "only this many of the most probable tokens"),
  number("min_p", "Min-p", 0.01, "only tokens of at least this probability, relative to the best one"),
  number("repeat_penalty", "Repeat penalty", 0.05, "1: none"),
  number("presence_penalty", "Presence penalty", 0.05, "0: none"),
  number("frequency_penalty", "Frequency penalty", 0.05, "0: none"),
  number("seed", "Seed", 1, "the same seed gives the same output; -1: a new one each time"),
  number("max_tokens", "Max tokens", 1, "-1: until the model stops or the context is full"),
];
const MORE = [
  number("repeat_last_n", "Penalties look back", 1, "tokens"),
  number("typical_p", "Typical-p", 0.01),
  number("top_n_sigma", "Top-n-sigma", 0.1),
  number("xtc_probability", "XTC probability", 0.01),
  number("xtc_threshold", "XTC threshold", 0.01),
  number("dynatemp_range", "Dynamic temperature: range", 0.05),
  number("dynatemp_exponent", "Dynamic temperature: exponent", 0.05),
  number("dry_multiplier", "DRY multiplier", 0.05),
  number("dry_base", "DRY base", 0.05),
  number("dry_allowed_length", "DRY allowed length", 1),
  number("dry_penalty_last_n", "DRY looks back", 1),
  number("mirostat", "Mirostat", 1, "0: off, 1, 2"),
  number("mirostat_tau", "Mirostat tau", 0.1),
  number("mirostat_eta", "Mirostat eta", 0.05),
  number("adaptive_target", "Adaptive-p target", 0.01),
  number("adaptive_decay", "Adaptive-p decay", 0.01),
  number("min_keep", "Keep at least", 1, "tokens"),
];
const TEXTS = [
  { name: "samplers", label: "Samplers", about: "names in order, separated by semicolons: top_k;top_p;temperature" },
  { name: "stop", label: "Stop strings", rows: 2, about: "one per line; the output ends before them" },
  { name: "grammar", label: "Grammar", rows: 3, about: "in GBNF: what the answer must be" },
  { name: "json_schema", label: "JSON schema", rows: 3, about: "format of the answer; not together with a grammar" },
  { name: "tools", label: "Tools", rows: 3, about: "functions that the model may call, as JSON in the form of OpenAI's API; the page shows the calls, and you enter their results" },
  { name: "chat_template_kwargs", label: "Variables for the chat template", rows: 1, about: 'in JSON: {"enable_thinking": false}' },
];
const OBJECTS = ["json_schema", "tools", "chat_template_kwargs"];

export const NOTHING = { system: "", values: {}, texts: {} };

/** The fields of a request's body. */
export function sampling({ values, texts }) {
  const found = { ...values };
  for (const [name, text] of Object.entries(texts)) {
    if (name === "stop") found.stop = text.split("\n").filter(Boolean);
    else if (name === "samplers") found.samplers = text.split(/[;,\s]+/).filter(Boolean);
    else found[name] = OBJECTS.includes(name) ? JSON.parse(text) : text;
  }
  return found;
}

/** Whether anything differs from the server's settings. */
export const isChanged = ({ system, values, texts }) => Boolean(system || Object.keys(values).length || Object.keys(texts).length);

/** Shows the dialog. `usual`: the server's own values. `save(settings)` gets the user's settings. */
export function editSettings(settings, usual, save) {
  const dialog = byId("settings");
  const inputs = new Map();
  const field = ({ name, label, step, about, rows }) => {
    const id = `setting-${name}`;
    const value = settings.values[name] ?? settings.texts[name] ?? "";
    const known = usual[name];
    const placeholder = name === "max_tokens" ? usual.n_predict : Array.isArray(known) ? known.join(";") : known;
    const shown = typeof placeholder === "number" ? String(+placeholder.toPrecision(5)) : String(placeholder ?? "");
    const input = step
      ? h("input", { id, type: "number", step: "any", inputmode: "decimal", placeholder: shown, "aria-describedby": about ? `${id}-about` : false })
      : h(rows ? "textarea" : "input", { id, rows, placeholder: rows ? "" : shown, spellcheck: "false", "aria-describedby": `${id}-about` });
    input.value = value;
    inputs.set(name, input);
    return h(
      "div", { class: step ? "setting" : "setting wide" },
      h("label", { for: id }, label), input, about && h("small", { id: `${id}-about` }, about),
    );
  };
  const system = h("textarea", { id: "setting-system", rows: 4, placeholder: "None" });
  system.value = settings.system;
  const wrong = h("p", { class: "error", role: "alert" });
  const hasMore = [...MORE, ...TEXTS].some(({ name }) => name in settings.values || name in settings.texts);

  const read = () => {
    const own = structuredClone(NOTHING);
    own.system = system.value.trim();
    for (const { name, label } of [...MAIN, ...MORE]) {
      const input = inputs.get(name);
      if (input.validity.badInput) throw new Error(`${label}: that is no number.`);
      if (input.value !== "") own.values[name] = Number(input.value);
    }
    for (const { name, label } of TEXTS) {
      const text = inputs.get(name).value;
      if (!text.trim()) continue;
      if (OBJECTS.includes(name)) {
        try {
          JSON.parse(text);
        } catch {
          throw new Error(`${label}: that is no JSON.`);
        }
      }
      own.texts[name] = text;
    }
    return own;
  };
  const submit = (event) => {
    event.preventDefault();
    try {
      save(read());
      dialog.close();
    } catch (error) {
      wrong.textContent = error.message;
    }
  };
  dialog.replaceChildren(h(
    "form", { onsubmit: submit, novalidate: true },
    h("header", {}, h("h2", { id: "settings-title" }, "System prompt and sampling"), iconButton("close", "Close", () => dialog.close())),
    h(
      "div", { class: "body" },
      h("label", { for: "setting-system" }, "System prompt"), system,
      h("p", { class: "about" }, "For this conversation and those that you start later. Empty fields use the server's settings."),
      h("div", { class: "grid" }, MAIN.map(field)),
      h("details", { open: hasMore }, h("summary", {}, "More"), h("div", { class: "grid" }, MORE.map(field)), TEXTS.map(field)),
    ),
    h(
      "footer", {}, wrong,
      h("button", { type: "button", class: "link", onclick: () => { save(structuredClone(NOTHING)); dialog.close(); } }, "Reset all"),
      h("button", { type: "submit", class: "main" }, "Apply"),
    ),
  ));
  dialog.showModal();
}
