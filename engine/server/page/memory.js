// The memory ledger as a stacked bar with a legend, over the bytes of the budget.

import { get } from "./api.js";
import { find, formatBytes, formatShare, make } from "./dom.js";

const NUM_COLORS = 8;

/** Everything that the budget goes to: receipts, KV pages, what is left. */
function parts(memory) {
  const held = memory.ledger.map((line) => ({
    name: line.owner,
    what: line.transient ? `${line.what} (free between steps)` : line.what,
    numBytes: line.num_bytes,
  }));
  held.push({ name: "KV pages", what: "keys and values of tokens", numBytes: memory.kv_bytes });
  const sum = held.reduce((total, part) => total + part.numBytes, 0);
  const left = Math.max(0, memory.budget_bytes - sum);
  const shown = held.filter((part) => part.numBytes > 0);
  return [
    ...shown.map((part, i) => ({ ...part, look: `part-${i % NUM_COLORS}` })),
    { name: "left", what: "claimed by nobody", numBytes: left, look: "part-free" },
  ];
}

function segment(part) {
  const element = make("div", { className: part.look });
  element.title = `${part.name}: ${formatBytes(part.numBytes)}, ${part.what}`;
  element.style.flexGrow = part.numBytes;
  return element;
}

function line(part, memory) {
  const swatch = make("span", { className: `swatch ${part.look}` });
  return make(
    "tr",
    {},
    make("td", {}, swatch, part.name),
    make("td", {}, part.what),
    make("td", { className: "number" }, formatBytes(part.numBytes)),
    make("td", { className: "number" }, formatShare(part.numBytes, memory.budget_bytes)),
  );
}

export async function showMemory() {
  const memory = await get("v1/memory");
  const shown = parts(memory);
  find("memory-summary").textContent =
    `Budget ${formatBytes(memory.budget_bytes)} of ${formatBytes(memory.total_bytes)}.`;
  find("memory-bar").replaceChildren(...shown.map(segment));
  find("memory-legend").replaceChildren(...shown.map((part) => line(part, memory)));
}
