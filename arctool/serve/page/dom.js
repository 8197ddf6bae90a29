// Making elements and icons. Knows nothing of chats.

/** An element: `props` are DOM properties, except `class`, `on` (listeners) and names with a dash, which are attributes. */
export function h(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined) continue;
    if (name === "class") element.className = value;
    else if (name === "on") for (const [type, listener] of Object.entries(value)) element.addEventListener(type, listener);
    else if (name.includes("-") || name === "role") element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

const SVG = "http://www.w3.org/2000/svg";

// On a grid of 24, drawn as lines.
const ICONS = {
  alert: "M12 8v5M12 16.5v.01M10.3 3.9 2.6 17.2A2 2 0 0 0 4.3 20h15.4a2 2 0 0 0 1.7-2.8L13.7 3.9a2 2 0 0 0-3.4 0Z",
  check: "m5 12.5 4.5 4.5L19 7.5",
  close: "M6 6l12 12M18 6 6 18",
  copy: "M9 9h9a1 1 0 0 1 1 1v9a1 1 0 0 1-1 1H9a1 1 0 0 1-1-1v-9a1 1 0 0 1 1-1ZM5 15H4V5a1 1 0 0 1 1-1h10v1",
  down: "M12 5v14M6 13l6 6 6-6",
  key: "M14.5 13.5a4.5 4.5 0 1 0-4-4L3 17v4h4v-3h3v-3l1.3-1.3M16 8v.01",
  left: "m14.5 6-6 6 6 6",
  menu: "M4 7h16M4 12h16M4 17h16",
  moon: "M20 14.5A8.5 8.5 0 0 1 9.5 4a8.5 8.5 0 1 0 10.5 10.5Z",
  pencil: "M4 20l1-4.5L16.5 4 20 7.5 8.5 19 4 20ZM14 6.5 17.5 10",
  plus: "M12 5v14M5 12h14",
  refresh: "M19.5 12a7.5 7.5 0 1 1-2.2-5.3L20 9M20 4v5h-5",
  right: "m9.5 6 6 6-6 6",
  screen: "M4 5h16v11H4ZM9 20h6M12 16v4",
  send: "M12 19V5M6 11l6-6 6 6",
  sliders: "M4 7h9M17 7h3M4 17h3M11 17h9M15 4.5v5M9 14.5v5",
  stop: "M7 7h10v10H7Z",
  sun: "M12 16a4 4 0 1 0 0-8 4 4 0 0 0 0 8ZM12 3v2M12 19v2M3 12h2M19 12h2M5.6 5.6 7 7M17 17l1.4 1.4M5.6 18.4 7 17M17 7l1.4-1.4",
  trash: "M5 7h14M10 7V4.5h4V7M7 7l.7 13h8.6L17 7M10.5 11v5M13.5 11v5",
};

export function icon(name) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", "0 0 24 24");
  svg.setAttribute("class", `icon icon-${name}`);
  svg.setAttribute("aria-hidden", "true");
  const path = document.createElementNS(SVG, "path");
  path.setAttribute("d", ICONS[name]);
  svg.append(path);
  return svg;
}

/** A button that shows an icon and is called `label`. */
export function iconButton(name, label, onClick, props = {}) {
  return h("button", { type: "button", class: "quiet", title: label, "aria-label": label, on: { click: onClick }, ...props }, icon(name));
}

/** Puts the icons into the places that the HTML names. */
export function fillIcons(root) {
  for (const place of root.querySelectorAll("[data-icon]")) place.replaceChildren(icon(place.dataset.icon));
}

/** Copies text and says so on the button; where the page may not use the clipboard (plain HTTP), the old way is tried. */
export async function copy(text, button, announce) {
  let done = true;
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    done = copyBySelection(text);
  }
  announce(done ? "Copied" : "The browser did not allow copying");
  if (!done) return;
  button.querySelector("svg").replaceWith(icon("check"));
  button.classList.add("done");
  setTimeout(() => {
    button.querySelector("svg").replaceWith(icon("copy"));
    button.classList.remove("done");
  }, 1500);
}

function copyBySelection(text) {
  const focused = document.activeElement;
  const area = h("textarea", { value: text, class: "visually-hidden", "aria-hidden": "true" });
  document.body.append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  focused?.focus();
  return done;
}
