// Draws line charts over time and bar charts as SVG. Text is set by textContent only, never as HTML.
"use strict";

const SVG = "http://www.w3.org/2000/svg";

function make(name, attributes = {}, text = "", space = null) {
  const found = space ? document.createElementNS(space, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) found.setAttribute(key, value);
  if (text !== "") found.textContent = text;
  return found;
}

const svg = (name, attributes, text = "") => make(name, attributes, text, SVG);

function ms(value) {
  if (value === null || value === undefined) return "-";
  if (value >= 10000) return `${(value / 1000).toFixed(1)} s`;
  return value >= 100 ? `${value.toFixed(0)} ms` : `${value.toFixed(1)} ms`;
}

function empty(into, words) {
  into.replaceChildren(make("div", { class: "empty" }, words));
}

// Top of an axis with 4 ticks: the lowest 4 * (1, 2 or 5) * 10^n that is not below the value.
function ceiling(value) {
  let unit = 10 ** Math.floor(Math.log10(Math.max(value, 1e-9) / 4));
  for (const factor of [1, 2, 5, 10]) if (unit * factor * 4 >= value) return unit * factor * 4;
  return unit * 40;
}

// Draws a line chart. series: [{name, kind, points: [[seconds, value or null]]}]; kind is the CSS
// class: one, two or target. whole: values are counts and drawn as steps.
function lines(into, series, { unit, now, whole = false }) {
  const values = series.flatMap((one) => one.points.map((point) => point[1]))
    .filter((value) => value !== null);
  const measured = series.filter((one) => one.kind !== "target");
  if (!measured.some((one) => one.points.some((point) => point[1] !== null))) {
    return empty(into, "no data yet");
  }
  const width = Math.max(280, into.clientWidth), height = 170;
  const left = 52, right = 10, top = 10, bottom = 24;
  let high = ceiling(Math.max(...values, whole ? 4 : 0));
  const times = measured.flatMap((one) => one.points.map((point) => point[0]));
  const begin = Math.min(now - 60, ...times);
  const x = (at) => left + ((at - begin) / (now - begin)) * (width - left - right);
  const y = (value) => top + (1 - value / high) * (height - top - bottom);
  const drawn = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img" });
  for (let tick = 0; tick <= 4; tick++) {
    const value = (high * tick) / 4;
    const at = y(value);
    drawn.append(svg("line", { class: "axis", x1: left, x2: width - right, y1: at, y2: at }));
    const shown = unit === "ms" ? axisMs(value) : `${+value.toFixed(1)}`;
    drawn.append(svg("text", { x: left - 6, y: at + 4, "text-anchor": "end" }, shown));
  }
  const span = now - begin;
  for (let tick = 0; tick <= 3; tick++) {
    const ago = (span * (3 - tick)) / 3;
    const words = ago === 0 ? "now" : span > 180 ? `-${(ago / 60).toFixed(0)} min` : `-${ago.toFixed(0)} s`;
    const anchor = tick === 0 ? "start" : tick === 3 ? "end" : "middle";
    drawn.append(svg("text", { x: x(now - ago), y: height - 6, "text-anchor": anchor }, words));
  }
  for (const one of series) {
    let path = "", pen = false;
    for (const [at, value] of one.points) {
      if (value === null) { pen = false; continue; }
      const [atX, atY] = [x(at).toFixed(1), y(value).toFixed(1)];
      // Counts change in steps.
      path += !pen ? `M${atX},${atY}` : whole ? `H${atX}V${atY}` : `L${atX},${atY}`;
      // A very short line makes a single point visible.
      if (!pen) path += "h0.1";
      pen = true;
    }
    drawn.append(svg("path", { class: one.kind, d: path }));
  }
  drawn.setAttribute("aria-label", series.map((one) => one.name).join(", "));
  const legend = make("div", { class: "legend" });
  for (const one of series) {
    const item = make("span");
    item.append(make("i", { class: one.kind }), one.name);
    legend.append(item);
  }
  legend.append(make("span", {}, `in ${unit}`));
  into.replaceChildren(drawn, legend);
}

function axisMs(value) {
  return value >= 10000 ? `${+(value / 1000).toFixed(1)} s` : `${+value.toFixed(1)} ms`;
}

// Draws one bar per row on a common time axis. rows: [{label, start_ms, duration_ms, kind}].
function bars(into, rows, total_ms) {
  if (!rows.length || !(total_ms > 0)) return empty(into, "no data yet");
  const width = Math.max(280, into.clientWidth), line = 20, left = 118, right = 66, top = 4;
  const height = top + rows.length * line + 24;
  const scale = (width - left - right) / total_ms;
  const drawn = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img" });
  rows.forEach((row, number) => {
    const at = top + number * line;
    drawn.append(svg("text", { x: left - 8, y: at + 13, "text-anchor": "end" }, row.label));
    const begin = left + row.start_ms * scale;
    const long = Math.max(1.5, row.duration_ms * scale);
    const bar = svg("rect", { class: row.kind, x: begin, y: at + 3, width: long, height: line - 7 });
    bar.append(svg("title", {}, `${row.label}: ${ms(row.duration_ms)} from ${ms(row.start_ms)}`));
    drawn.append(bar);
    drawn.append(svg("text", { x: width - 2, y: at + 13, "text-anchor": "end" }, ms(row.duration_ms)));
  });
  for (let tick = 0; tick <= 2; tick++) {
    const value = (total_ms * tick) / 2;
    const anchor = ["start", "middle", "end"][tick];
    drawn.append(svg("text", { x: left + value * scale, y: height - 6, "text-anchor": anchor }, ms(value)));
  }
  into.replaceChildren(drawn);
}
