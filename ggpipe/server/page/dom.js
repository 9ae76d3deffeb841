// Elements, icons, and numbers in the terminal's format.

const SVG = "http://www.w3.org/2000/svg";

/** An element. Of `props`, functions are listeners (`onclick`), `class` and others are attributes; false leaves one
 * out. Children are nodes or strings, never HTML. */
export function h(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (typeof value === "function") element.addEventListener(name.slice(2), value);
    else if (value !== false && value !== null && value !== undefined) {
      element.setAttribute(name, value === true ? "" : value);
    }
  }
  for (const child of children.flat()) {
    if (child !== null && child !== undefined && child !== false) element.append(child);
  }
  return element;
}

const PATHS = {
  plus: "M12 5v14M5 12h14",
  list: "M4 6h16M4 12h16M4 18h10",
  sliders: "M4 7h10M18 7h2M4 17h2M10 17h10M16 4v6M8 14v6",
  pulse: "M3 12h4l3-8 4 16 3-8h4",
  send: "M12 20V5M5 12l7-7 7 7",
  stop: "M7 7h10v10H7z",
  clip: "M20 11l-8.5 8.5a5 5 0 0 1-7-7L13 4a3.4 3.4 0 0 1 4.8 4.8L9.300 17.300a1.700 1.700 0 0 1-2.400-2.400L14.500 7.500",
  copy: "M9 9h11v11H9zM15 9V4H4v11h5",
  check: "M4 12.500l5.500 5.500L20 7",
  pencil: "M4 20l1-4L16.500 4.500l3 3L8 19z",
  again: "M20 12a8 8 0 1 1-2.500-5.800M20 3v4.500h-4.500",
  trash: "M4 7h16M9 7V4h6v3M6 7l1 13h10l1-13",
  close: "M6 6l12 12M18 6L6 18",
  left: "M14 6l-6 6 6 6",
  right: "M10 6l6 6-6 6",
  go: "M5 5v14M10 12h10M15 7l5 5-5 5",
};

/** A line drawing, hidden from screen readers: its button has a label. */
export function icon(name) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", "0 0 24 24");
  svg.setAttribute("aria-hidden", "true");
  const path = document.createElementNS(SVG, "path");
  path.setAttribute("d", PATHS[name]);
  svg.append(path);
  return svg;
}

/** An icon button, with its label as a tooltip. */
export function iconButton(name, label, onclick, props = {}) {
  return h("button", { type: "button", class: "icon", "aria-label": label, title: label, onclick, ...props }, icon(name));
}

export const byId = (id) => document.getElementById(id);

let toastTimer = 0;

/** A message at the bottom for some seconds, with one action. */
export function toast(text, action = "", act = () => {}) {
  const place = byId("toast");
  const close = () => { place.hidden = true; };
  const button = action && h("button", { type: "button", class: "link", onclick: () => { close(); act(); } }, action);
  place.replaceChildren(h("span", {}, text), ...(button ? [button] : []));
  place.hidden = false;
  clearTimeout(toastTimer);
  toastTimer = setTimeout(close, action ? 8000 : 4000);
}

/** Copies text, and shows that on the button. Plain HTTP to other hosts has no clipboard API. */
export async function copyText(text, button) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = h("textarea", { class: "unseen" });
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
    button.focus();
  }
  const before = button.firstChild;
  button.replaceChildren(icon("check"));
  setTimeout(() => button.replaceChildren(before), 1500);
}

// Numbers in the format of `ggpipe/display/format.py`

const three = (value) => (value < 9.995 ? value.toFixed(2) : value < 99.95 ? value.toFixed(1) : value.toFixed(0));

export const rate = (perSecond) => (perSecond === null || perSecond === undefined ? "–" : `${three(perSecond)} t/s`);

export const percent = (share) => (share === null || share === undefined ? "–" : `${Math.round(share * 100)} %`);

export const counted = (n, what) => `${n.toLocaleString("en")} ${what}${n === 1 ? "" : "s"}`;

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 0.9995) return `${value > 0 && value < 0.00995 ? (value * 1e3).toFixed(1) : Math.round(value * 1e3)} ms`;
  return `${three(value)} s`;
}

export function bytes(n) {
  if (n < 1000) return `${n} B`;
  for (const unit of ["kB", "MB", "GB", "TB"]) {
    n /= 1000;
    if (n < 99.95) return `${n.toFixed(1)} ${unit}`;
    if (n < 999.5 || unit === "TB") return `${n.toFixed(0)} ${unit}`;
  }
  return "";
}
