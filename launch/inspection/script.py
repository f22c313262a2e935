"""The report's script: the tip that follows pointer and arrow keys. It writes text only, never markup."""

SCRIPT = """
"use strict";
const tip = document.getElementById("tip");
let at = null;

function line(text) {
  const columns = text.split("\\t"), row = document.createElement("div");
  for (const column of columns) row.appendChild(document.createElement("span")).textContent = column;
  return row;
}

function show(target, x, y) {
  const [title, ...lines] = target.dataset.tip.split("\\n");
  tip.textContent = "";
  tip.appendChild(document.createElement("b")).textContent = title;
  for (const text of lines) {
    tip.appendChild(line(text));
    if (text.endsWith(" %")) {
      const share = tip.appendChild(document.createElement("div"));
      share.className = "share";
      share.style.width = parseFloat(text.slice(text.lastIndexOf("\\t"))) + "%";
    }
  }
  tip.hidden = false;
  const box = tip.getBoundingClientRect(), right = innerWidth - box.width - 8;
  tip.style.left = Math.max(8, Math.min(x + 14, right)) + "px";
  tip.style.top = (y + 18 + box.height > innerHeight ? Math.max(8, y - box.height - 12) : y + 18) + "px";
}

function leave() {
  tip.hidden = true;
  if (at) at.classList.remove("at");
  at = null;
}

function follow(event) {
  const target = event.target.closest ? event.target.closest("[data-tip]") : null;
  if (target) show(target, event.clientX, event.clientY); else leave();
}

document.addEventListener("pointermove", follow);
document.addEventListener("pointerdown", follow);
document.addEventListener("scroll", () => { if (!at) tip.hidden = true; }, true);
document.documentElement.addEventListener("pointerleave", leave);

for (const box of document.querySelectorAll(".scroll")) box.scrollLeft = box.scrollWidth;  // its end matters

const steps = {ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0]};
for (const table of document.querySelectorAll(".lens")) {
  table.addEventListener("keydown", event => {
    const step = steps[event.key];
    if (!step) return;
    event.preventDefault();
    const row = at ? at.parentNode.rowIndex + step[0] : 1, column = at ? at.cellIndex + step[1] : 1;
    const next = table.rows[row] && table.rows[row].cells[column];
    if (!next || !next.dataset.tip) return;
    leave();
    at = next;
    at.classList.add("at");
    at.scrollIntoView({block: "nearest", inline: "nearest"});
    const box = at.getBoundingClientRect();
    requestAnimationFrame(() => at && show(at, box.left, box.bottom - 14));
  });
  table.addEventListener("blur", leave);
}
"""
