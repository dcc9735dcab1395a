"use strict";
// Draws the page from the JSON block beside it. Everything that comes from the run is set as text, never as HTML.
const data = JSON.parse(document.getElementById("data").textContent);
const SVG = "http://www.w3.org/2000/svg";
const charts = [];

function element(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) node.setAttribute(name, value);
  for (const child of children) node.append(child);
  return node;
}

function shape(tag, attributes, text) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== undefined) node.textContent = text;
  return node;
}

function show(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2).replace(/\.?0*e\+?/, "e");
  return String(Number(value.toPrecision(size >= 1000 ? 6 : 4)));
}

function ticks(low, high, count) {
  const rough = (high - low) / count;
  const power = Math.pow(10, Math.floor(Math.log10(rough)));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((candidate) => candidate >= rough);
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step * 1e-6; at += step) found.push(Number(at.toPrecision(10)));
  return found;
}

// Exponential moving average that starts unbiased and steps over gaps.
function smoothed(values, weight) {
  let sum = 0, mass = 0;
  return values.map((value) => {
    if (value === null) return null;
    sum = weight * sum + (1 - weight) * value;
    mass = weight * mass + (1 - weight);
    return sum / mass;
  });
}

class Chart {
  constructor(spec) {
    this.spec = spec;
    this.at = element("span", {class: "at"});
    this.svg = shape("svg", {class: "chart", role: "img", "aria-label": spec.title});
    this.legend = element("div", {class: "legend"});
    const title = element("span", {title: spec.title}, spec.title);
    this.card = element("div", {class: "card" + (spec.kind === "stack" ? " wide" : "")},
      element("div", {class: "head"}, title, this.at), this.svg, this.legend);
    this.svg.addEventListener("pointermove", (event) => pointAt(this.stepUnder(event)));
    this.svg.addEventListener("pointerleave", () => pointAt(null));
    this.values = spec.series.map((one) => {
      const value = element("b", {});
      this.legend.append(element("span", {class: "k" + this.color(one)}, element("i"), short(one.label, spec), value));
      return value;
    });
    charts.push(this);
  }

  color(one) { return this.spec.series.indexOf(one) % 8; }

  draw() {
    const width = this.svg.clientWidth, height = this.svg.clientHeight;
    if (!width) return;
    const {x, kind} = this.spec;
    const weight = kind === "stack" ? 0 : Number(document.getElementById("smooth").value);
    this.box = {left: 48, right: width - 8, top: 10, bottom: height - 22};
    this.svg.replaceChildren();
    this.lines = this.layers(weight);
    const flat = this.lines.flatMap((line) => [...line.top, ...(line.low || []), ...(line.high || [])]).filter((v) => v !== null);
    if (!flat.length) {
      this.svg.append(shape("text", {x: width / 2, y: height / 2, "text-anchor": "middle"}, "no finite value"));
      return;
    }
    let low = Math.min(...flat), high = Math.max(...flat);
    if (kind === "stack") low = 0;
    if (high - low < 1e-12 * Math.max(1, Math.abs(high))) { const pad = Math.abs(high) * 0.1 || 1; low -= pad; high += pad; }
    const pad = (high - low) * 0.06;
    this.range = {low: kind === "stack" ? 0 : low - pad, high: high + pad, first: x[0], last: x[x.length - 1]};
    this.axes();
    for (const line of this.lines) this.layer(line, kind);
    this.cursor = shape("line", {class: "cursor", y1: this.box.top, y2: this.box.bottom, visibility: "hidden"});
    this.svg.append(this.cursor);
    this.point(null);
  }

  layers(weight) {
    const {series, kind, x} = this.spec;
    let base = x.map(() => 0);
    return series.map((one) => {
      const color = this.color(one);
      if (kind !== "stack") {
        const top = weight > 0 ? smoothed(one.y, weight) : one.y;
        return {color, top, raw: weight > 0 ? one.y : null, low: one.lo, high: one.hi};
      }
      const bottom = base;
      base = bottom.map((value, index) => value + (one.y[index] || 0));
      return {color, top: base, bottom};
    });
  }

  px(step) {
    const {first, last} = this.range;
    return this.box.left + (last === first ? 0.5 : (step - first) / (last - first)) * (this.box.right - this.box.left);
  }

  py(value) {
    const {low, high} = this.range;
    return this.box.bottom - ((value - low) / (high - low)) * (this.box.bottom - this.box.top);
  }

  axes() {
    const {left, right, top, bottom} = this.box;
    for (const value of ticks(this.range.low, this.range.high, 4)) {
      const y = this.py(value);
      if (y < top - 1 || y > bottom + 1) continue;
      this.svg.append(shape("line", {class: "rule", x1: left, x2: right, y1: y, y2: y}));
      this.svg.append(shape("text", {x: left - 6, y: y + 3.5, "text-anchor": "end"}, show(value)));
    }
    this.svg.append(shape("line", {class: "axis", x1: left, x2: right, y1: bottom, y2: bottom}));
    const {first, last} = this.range;
    const steps = first === last ? [first] : ticks(first, last, Math.max(2, Math.floor((right - left) / 55)));
    for (const step of steps.filter(Number.isInteger)) {
      this.svg.append(shape("text", {x: this.px(step), y: bottom + 15, "text-anchor": "middle"}, show(step)));
    }
  }

  path(values) {
    let text = "", pen = false;
    values.forEach((value, index) => {
      if (value === null) { pen = false; return; }
      text += (pen ? "L" : "M") + this.px(this.spec.x[index]).toFixed(1) + " " + this.py(value).toFixed(1);
      pen = true;
    });
    return text;
  }

  between(low, high) {
    const kept = this.spec.x.map((_, index) => index).filter((index) => low[index] !== null && high[index] !== null);
    const at = (index, values) => this.px(this.spec.x[index]).toFixed(1) + " " + this.py(values[index]).toFixed(1);
    if (!kept.length) return "";
    return "M" + kept.map((index) => at(index, high)).join("L") + "L" + kept.reverse().map((index) => at(index, low)).join("L") + "Z";
  }

  layer(line, kind) {
    const color = " k" + line.color;
    if (kind === "stack") {
      this.svg.append(shape("path", {class: "area" + color, d: this.between(line.bottom, line.top)}));
      return;
    }
    if (line.low) this.svg.append(shape("path", {class: "band" + color, d: this.between(line.low, line.high)}));
    if (line.raw) this.svg.append(shape("path", {class: "raw" + color, d: this.path(line.raw)}));
    this.svg.append(shape("path", {class: "curve" + color, d: this.path(line.top)}));
    const points = line.top.map((value, index) => index).filter((index) => line.top[index] !== null);
    if (points.length > 30) return;
    for (const index of points) {
      this.svg.append(shape("circle", {class: "dot" + color, r: 2.2, cx: this.px(this.spec.x[index]), cy: this.py(line.top[index])}));
    }
  }

  stepUnder(event) {
    if (!this.range) return null;
    const {left, right} = this.box;
    const share = (event.clientX - this.svg.getBoundingClientRect().left - left) / (right - left);
    return this.range.first + Math.min(1, Math.max(0, share)) * (this.range.last - this.range.first);
  }

  // Without a step the newest value is shown.
  point(step) {
    if (!this.range) return;
    const {x, series, kind} = this.spec;
    let index = x.length - 1;
    if (step !== null) for (let i = 0; i < x.length; i++) if (Math.abs(x[i] - step) < Math.abs(x[index] - step)) index = i;
    this.at.textContent = step === null ? "" : "step " + x[index];
    this.cursor.setAttribute("visibility", step === null ? "hidden" : "visible");
    this.cursor.setAttribute("x1", this.px(x[index]));
    this.cursor.setAttribute("x2", this.px(x[index]));
    series.forEach((one, i) => {
      let value = one.y[index];
      if (step === null) value = one.y.filter((v) => v !== null).pop();
      else if (kind !== "stack") value = this.lines[i].top[index];
      const at = step === null ? one.y.lastIndexOf(value) : index;
      const between = one.range && at >= 0 ? " (" + show(one.lo[at]) + " to " + show(one.hi[at]) + ")" : "";
      this.values[i].textContent = show(value) + between;
    });
  }
}

function short(label, spec) {
  return spec.series.length === 1 ? label : label.slice(Math.max(label.lastIndexOf("/"), 0)).replace("/", "") || label;
}

function pointAt(step) { for (const chart of charts) chart.point(step); }

function section(id, title) {
  document.getElementById("nav").append(element("a", {href: "#" + id}, title));
}

function drawCharts() {
  const named = new Map();
  for (const spec of data.charts) named.set(spec.section, [...(named.get(spec.section) || []), spec]);
  const front = document.getElementById("charts"), more = document.getElementById("more");
  let folded = null;
  for (const [name, specs] of named) {
    const grid = element("div", {class: "grid"}, ...specs.map((spec) => new Chart(spec).card));
    if (["Overview", "Evaluation", "Timings"].includes(name)) {
      const id = "s-" + name.toLowerCase();
      front.append(element("section", {id}, element("h2", {}, name), grid));
      section(id, name);
      continue;
    }
    if (!folded) {
      folded = element("div", {});
      more.append(element("h2", {}, "All other metrics"), folded);
    }
    const details = element("details", {}, element("summary", {}, name + " (" + specs.length + ")"), grid);
    details.addEventListener("toggle", redraw);
    folded.append(details);
  }
  if (!data.charts.length) front.append(element("p", {class: "empty"}, "No step has been recorded yet."));
}

function table(head, rows) {
  const titles = head.length ? [element("tr", {}, ...head.map((text) => element("th", {}, text)))] : [];
  return element("table", {}, ...titles, ...rows.map((cells) => element("tr", {}, ...cells)));
}

function drawHealth() {
  const body = document.getElementById("health-body");
  const row = (item) => [
    element("td", {}, element("span", {class: "dotted " + item.level}, item.subject)),
    element("td", {class: "value"}, item.value),
    element("td", {}, item.meaning + (item.steps ? " " : ""), element("span", {class: "quiet"}, item.steps)),
  ];
  const odd = data.health.filter((item) => item.level !== "ok"), fine = data.health.filter((item) => item.level === "ok");
  if (odd.length) body.append(element("div", {class: "card"}, table([], odd.map(row))));
  else body.append(element("p", {class: "empty"}, data.health.length ? "Nothing to complain about." : "Nothing was measured yet."));
  if (fine.length) {
    body.append(element("p", {}));
    body.append(element("details", {}, element("summary", {}, fine.length + " checks are fine"), table([], fine.map(row))));
  }
  section("health", "Health");
}

function fact(name, value) { return element("span", {}, name + " ", element("b", {}, show(value))); }

function sampleCard(sample) {
  const facts = element("div", {class: "facts"}, fact("reward", sample.reward === null ? "abstained" : sample.reward));
  for (const [name, value] of Object.entries(sample.rewards)) facts.append(fact(name, value === null ? "abstained" : value));
  if (sample.advantage !== null && sample.advantage !== undefined) facts.append(fact("advantage", sample.advantage));
  facts.append(fact("tokens", sample.num_tokens), fact("end", sample.finish_reason), fact("task", sample.task_id));
  return element("div", {class: "card sample"}, facts,
    element("div", {class: "text prompt"}, sample.prompt), element("div", {class: "text"}, sample.response));
}

function drawSamples() {
  const body = document.getElementById("samples-body");
  section("samples", "Samples");
  if (!data.samples.length) {
    body.append(element("p", {class: "empty"}, "No trajectories were recorded for this run."));
    return;
  }
  const last = data.samples.length - 1;
  const slider = element("input", {type: "range", min: 0, max: last, value: last, "aria-label": "step"});
  const label = element("b", {}), pair = element("div", {class: "pair"});
  const move = (by) => { slider.value = Number(slider.value) + by; pick(); };
  const back = element("button", {type: "button"}, "‹"), next = element("button", {type: "button"}, "›");
  const column = (title, samples) => element("div", {}, element("h3", {}, title), ...samples.map(sampleCard));
  function pick() {
    const index = Number(slider.value), found = data.samples[index];
    label.textContent = "step " + found.step + ", " + found.count + " trajectories";
    back.disabled = index === 0;
    next.disabled = index === last;
    pair.replaceChildren(column("Best", found.best));
    if (found.worst.length) pair.append(column("Worst", found.worst));
  }
  slider.addEventListener("input", pick);
  back.addEventListener("click", () => move(-1));
  next.addEventListener("click", () => move(1));
  body.append(element("div", {class: "picker"}, back, slider, next, label), pair);
  pick();
}

function drawCheckpoints() {
  const body = document.getElementById("checkpoints-body");
  section("checkpoints", "Checkpoints");
  if (!data.checkpoints.length) { body.append(element("p", {class: "empty"}, "There is none yet.")); return; }
  const cell = (value) => element("td", {class: "value"}, show(value));
  body.append(element("div", {class: "card"}, table(["step", "score", "size", "written"],
    data.checkpoints.map((one) => [cell(one.step), cell(one.score), cell(one.size), cell(one.created)]))));
}

function redraw() { for (const chart of charts) chart.draw(); }

drawCharts();
drawHealth();
drawSamples();
drawCheckpoints();
section("setup", "Set-up");
redraw();
document.getElementById("smooth").addEventListener("input", redraw);
document.getElementById("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
});
let timer = 0;
addEventListener("resize", () => { clearTimeout(timer); timer = setTimeout(redraw, 80); });
