// Conveniences: every page works without this script.
"use strict";

// Tooltips: the reader's own time, and the whole of a name that is cut off.
document.addEventListener("pointerover", (event) => {
  const name = event.target.closest?.(".text");
  if (name?.scrollHeight > name?.clientHeight + 1) name.title = name.textContent;
  const time = event.target.closest?.("time[datetime]:not([title])");
  if (time) {
    const options = { dateStyle: "medium", timeStyle: "long" };
    time.title = new Date(time.dateTime).toLocaleString(undefined, options) + " – your time";
  }
});

for (const button of document.querySelectorAll("button[data-copy]")) {
  const source = document.getElementById(button.dataset.copy);
  button.hidden = false;
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(source.textContent);
    } catch {
      // Without HTTPS there is no clipboard to write to, but what is selected can be copied.
      getSelection().selectAllChildren(source);
      document.execCommand("copy");
    }
    button.textContent = "Copied";
    setTimeout(() => (button.textContent = "Copy"), 2000);
  });
}

// The values of a bar at the pointer or the finger. A click opens its interval; a finger, which can't point before it clicks,
// gets a link to it.
const charts = document.querySelector(".charts")?.dataset;
const [labels, ranges] = [charts?.labels.split("|"), charts?.ranges.split("|")];
const addressOf = (bar) => {
  const address = new URL(charts.address, location);
  address.searchParams.set("range", ranges[bar]);
  return address.href;
};
for (const plot of document.querySelectorAll(".plot")) {
  const make = (name) => plot.appendChild(Object.assign(document.createElement("div"), { className: name, hidden: true }));
  const [band, tip] = [make("band"), make("tip")];
  const svg = plot.querySelector("svg");
  const names = [...plot.parentElement.querySelectorAll(".legend li")];
  const series = [...svg.querySelectorAll("[data-values]")].map((path) => path.dataset.values.split(","));
  const barAt = (event) => {
    const box = svg.getBoundingClientRect();
    return Math.min(labels.length - 1, Math.max(0, Math.floor((event.clientX - box.left) / box.width * labels.length)));
  };
  let isTouch = false;
  const show = (event) => {
    isTouch = event.pointerType === "touch";
    const [frame, box, bar] = [plot.getBoundingClientRect(), svg.getBoundingClientRect(), barAt(event)];
    const width = box.width / labels.length;
    const values = series.map((series) => series[bar]);
    const lines = names.map((name, number) => [[...name.cloneNode(true).childNodes], values[number]]);
    if (lines.length > 1) lines.push([["Total"], values.reduce((sum, value) => sum + Number(value), 0)]);
    tip.replaceChildren(labels[bar], ...lines.map(([name, value]) => {
      const line = document.createElement("div");
      const text = value === "" ? "–" : Number(value).toLocaleString("en-US");
      line.append(...name, Object.assign(document.createElement("b"), { textContent: text }));
      return line;
    }));
    if (isTouch) tip.append(Object.assign(document.createElement("a"), { href: addressOf(bar), textContent: "Open" }));
    band.hidden = tip.hidden = false;
    const left = box.left - frame.left + bar * width;
    Object.assign(band.style, { left: `${left}px`, width: `${width}px` });
    const room = frame.width - tip.offsetWidth;
    tip.style.left = `${Math.max(0, Math.min(room, left + width / 2 - tip.offsetWidth / 2))}px`;
  };
  svg.addEventListener("click", (event) => isTouch || location.assign(addressOf(barAt(event))));
  svg.addEventListener("pointermove", show);
  svg.addEventListener("pointerdown", show);
  const hide = () => (band.hidden = tip.hidden = true);
  // A finger that is lifted leaves the figures to be read.
  svg.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && hide());
  addEventListener("pointerdown", (event) => plot.contains(event.target) || hide());
}

// A second click would show the list of keys in place of the new secret.
const create = document.querySelector("form[action='/keys'] button[type=submit]");
if (create) {
  create.form.addEventListener("submit", () => (create.disabled = true));
  addEventListener("pageshow", () => (create.disabled = false));
}

// Counts down the time to wait.
const wait = document.querySelector("[data-seconds]");
if (wait) {
  let left = Number(wait.dataset.seconds);
  const timer = setInterval(() => {
    left -= 1;
    if (left > 0) wait.textContent = left + (left === 1 ? " second" : " seconds");
    else {
      clearInterval(timer);
      wait.parentElement.textContent = "You can try again now.";
    }
  }, 1000);
}
