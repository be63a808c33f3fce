// Small helpers for the document. All text goes through text nodes: names and answers are hostile.

export const find = (id) => document.getElementById(id);

/** An element with properties and children; strings become text nodes. */
export function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

export function formatBytes(numBytes) {
  let size = numBytes;
  let unit = 0;
  while (size >= 1024 && unit < UNITS.length - 1) {
    size /= 1024;
    unit += 1;
  }
  return `${unit ? size.toFixed(1) : size} ${UNITS[unit]}`;
}

export const formatShare = (part, whole) => (whole ? `${((100 * part) / whole).toFixed(1)}%` : "");

export function say(element, text, isError = false) {
  element.textContent = text;
  element.classList.toggle("bad", isError);
}
