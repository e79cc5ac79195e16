"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const timeline = data.timeline;
  const byId = (id) => document.getElementById(id);

  // -- elements and texts; whatever comes from a model is set as text, never as markup

  function element(tag, className, ...children) {
    const made = document.createElement(tag);
    if (className) made.className = className;
    made.append(...children.map((child) => (child instanceof Node ? child : document.createTextNode(String(child)))));
    return made;
  }

  function bytesText(bytes) {
    for (const suffix of ["B", "KiB", "MiB", "GiB"]) {
      if (bytes < 1024 || suffix === "GiB") return `${Number.isInteger(bytes) ? bytes : bytes.toFixed(1)} ${suffix}`;
      bytes /= 1024;
    }
  }

  const UNIT = timeline.unit;
  const number = (value) => value.toFixed(2);
  const at = (time) => (UNIT === "slots" ? `slot ${number(time)}` : `${number(time)} ${UNIT}`);
  const whole = (value) => value.toLocaleString("en-US");
  const counted = (count, word) => `${whole(count)} ${word}${count === 1 ? "" : "s"}`;

  // -- items: all that can be pointed at, by lane in order of time

  const lanes = timeline.lanes.map((lane, index) => ({ queue: lane.queue, index, bars: [], marks: [], gaps: [], items: [] }));
  const operations = data.operations.map((row, index) => ({ ...row, index }));
  for (const [shape, found] of [["bars", "bar"], ["marks", "mark"]]) {
    timeline.lanes.forEach((lane, index) => {
      lanes[index][shape] = lane[shape].map((entry) => ({
        ...entry, shape: found, lane: index,
        start: found === "bar" ? entry.start : entry.time, end: found === "bar" ? entry.end : entry.time,
      }));
    });
  }
  for (const row of operations) {
    if (!row.at) continue;
    const [lane, shape, number] = row.at;
    row.item = lanes[lane][shape][number];
    row.item.row = row;
  }
  const computeLane = lanes.find((lane) => lane.queue === "compute");
  computeLane.gaps = timeline.exposed.map((gap) => ({ ...gap, shape: "gap", lane: computeLane.index, name: gap.cause }));
  for (const lane of lanes) {
    lane.items = [...lane.bars, ...lane.marks, ...lane.gaps].sort((a, b) => a.start - b.start || a.end - b.end);
    lane.items.forEach((item, place) => { item.place = place; });
  }
  const flatUnits = new Map(data.units.map((unit) => [unit.name, unit.unit]));
  const ownerOf = (item) => item.unit || flatUnits.get(item.name) || "";

  function title(item) {
    if (item.shape === "gap") return `compute waits for ${item.cause}`;
    if (item.kind === "compute") return `${item.name || data.words["no unit"]}, ${item.phase}`;
    if (item.shape === "bar") return `${data.words.kinds[item.kind]} ${item.name}, ${item.phase}`;
    return `${item.row.op} ${item.name}, ${item.phase}`;
  }

  function facts(item) {
    const lines = [];
    if (item.shape === "mark") {
      lines.push(`at ${at(item.start)} on ${item.queue}`);
      lines.push(item.kind === "wait" ? `waits ${item.row.note}, on the ${item.source} queue` : data.words.kinds[item.kind]);
    } else {
      lines.push(`${UNIT} ${number(item.start)} to ${number(item.end)}, ${number(item.end - item.start)} long`);
    }
    if (item.num_bytes) lines.push(bytesText(item.num_bytes));
    if (item.num_operators) lines.push(counted(item.num_operators, "operator"));
    if (item.passes && item.passes.length) {
      const [first, ...moved] = item.passes;
      lines.push(`put there by ${first}${moved.length ? `, moved by ${moved.join(", ")}` : ""}`);
    }
    return lines;
  }

  /** What the passes said about the FlatParameter, or the unit, of an item. */
  function remarksOn(item) {
    const names = new Set([item.name, ownerOf(item)].filter(Boolean));
    const said = data.passes.flatMap((pass) => pass.remarks.filter((remark) => names.has(remark.unit)).map((remark) => [pass.text, remark]));
    if (!said.length) return [];
    const list = said.map(([pass, remark]) => element("li", "", element("span", remark.kind === "missed" ? "missed" : "", remark.kind), element("span", "name", pass), element("span", "", remark.text)));
    return [element("details", "", element("summary", "", `${counted(said.length, "remark")} of the passes on this unit`), element("ul", "remarks", ...list))];
  }

  // -- colours, from the style sheet, so that they follow the colour scheme

  const colours = {};
  function readColours() {
    const style = getComputedStyle(document.documentElement);
    for (const name of ["paper", "panel", "ink", "faint", "edge", "grid", "accent", "exposed", "gathered", "gradients", "none"]) {
      colours[name] = style.getPropertyValue(`--${name}`).trim();
    }
    colours.dark = matchMedia("(prefers-color-scheme: dark)").matches;
  }

  function fill(unit) {
    const hue = data.hues[unit];
    if (!hue) return colours.none;
    const [odd, parts] = [hue[3], hue.slice(0, 3)];
    const [ground, share] = colours.dark ? [[18, 22, 28], odd ? 0.42 : 0.56] : [[255, 255, 255], odd ? 0.42 : 0.66];
    return `rgb(${parts.map((part, i) => Math.round(part + (ground[i] - part) * share)).join(",")})`;
  }

  // -- the timeline

  const plot = byId("plot");
  const context = plot.getContext("2d");
  const FONT = '11px system-ui, -apple-system, "Segoe UI", Roboto, Helvetica, Arial, "DejaVu Sans", sans-serif';
  const PHASES = 24, OVERVIEW = 22, MARKS = 15, FLIGHT = 20, AXIS = 34, MEMORY = 130, NAMES = 17, TOP = 8, ROOM = 9;
  // ROOM is what half a mark or half a number takes beside the plot.
  const END = Math.max(timeline.end, 1e-9);
  const CLOSEST = 0.05 * timeline.slot; // this much across the plot, at most this near
  const view = { start: 0, end: END };
  const picture = { width: 0, height: 0, left: 130, lanes: [], rows: {} };
  let hovered = null, selected = null, matching = null;

  function place() {
    picture.width = plot.clientWidth || 800;
    picture.left = picture.width < 700 ? 92 : 130;
    let y = TOP + OVERVIEW + 8;
    picture.phases = y;
    y += PHASES + 8;
    picture.lanes = lanes.map((lane, index) => {
      const height = lane === computeLane ? 40 : 28;
      const row = { top: y, bottom: y + height, marks: 0, names: 0 };
      y += height;
      if (lane === computeLane) { row.names = y + NAMES / 2 + 2; y += NAMES; }
      if (lane.marks.length) { row.marks = y + MARKS / 2 + 2; y += MARKS; }
      if (index < lanes.length - 1) y += FLIGHT;
      return row;
    });
    picture.memory = y + 34;
    picture.axis = picture.memory + MEMORY;
    picture.height = picture.axis + AXIS;
    plot.style.height = `${picture.height}px`;
    const ratio = window.devicePixelRatio || 1;
    plot.width = Math.round(picture.width * ratio);
    plot.height = Math.round(picture.height * ratio);
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
  }

  const right = () => picture.width - 12;
  const scale = () => (right() - picture.left) / (view.end - view.start);
  const toX = (time) => picture.left + (time - view.start) * scale();
  const toTime = (x) => view.start + (x - picture.left) / scale();
  const overviewX = (time) => picture.left + (time / END) * (right() - picture.left);
  const shown = (item) => item.end >= view.start && item.start <= view.end;
  const beside = (item) => toX(item.time) >= picture.left - ROOM && toX(item.time) <= right() + ROOM;
  const dimmed = (item) => matching !== null && !matching.has(item);

  let pending = false;
  function redraw() {
    if (pending) return;
    pending = true;
    requestAnimationFrame(() => { pending = false; draw(); });
  }

  function draw() {
    context.clearRect(0, 0, picture.width, picture.height);
    context.font = FONT;
    context.textBaseline = "middle";
    context.lineWidth = 1;
    drawOverview();
    drawGutter();
    clipped(ROOM, drawAxis);
    clipped(0, () => { drawPhases(); drawMemory(); drawArrows(); lanes.forEach(drawBars); });
    clipped(ROOM, () => {
      lanes.forEach(drawNames);
      lanes.forEach(drawMarks);
      for (const item of new Set([selected, hovered])) if (item) drawOutline(item);
    });
    updateButtons();
  }

  function clipped(room, paint) {
    context.save();
    context.beginPath();
    context.rect(picture.left - room, picture.phases, right() - picture.left + 2 * room, picture.height);
    context.clip();
    paint();
    context.restore();
  }

  function drawOverview() {
    const y = TOP, height = OVERVIEW;
    context.fillStyle = colours.panel;
    context.fillRect(picture.left, y, right() - picture.left, height);
    for (const bar of computeLane.bars) {
      context.fillStyle = fill(bar.unit);
      context.globalAlpha = dimmed(bar) ? 0.15 : 1;
      context.fillRect(overviewX(bar.start), y + 4, Math.max(overviewX(bar.end) - overviewX(bar.start), 0.5), height - 8);
    }
    context.globalAlpha = 1;
    context.fillStyle = colours.exposed;
    for (const gap of timeline.exposed) {
      context.fillRect(overviewX(gap.start), y + height - 4, Math.max(overviewX(gap.end) - overviewX(gap.start), 0.5), 3);
    }
    const [from, to] = [overviewX(view.start), overviewX(view.end)];
    context.fillStyle = colours.paper;
    context.globalAlpha = 0.62;
    context.fillRect(picture.left, y, from - picture.left, height);
    context.fillRect(to, y, right() - to, height);
    context.globalAlpha = 1;
    context.strokeStyle = colours.accent;
    context.strokeRect(from + 0.5, y + 0.5, Math.max(to - from - 1, 2), height - 1);
  }

  function drawGutter() {
    context.textAlign = "right";
    lanes.forEach((lane, index) => {
      const row = picture.lanes[index], middle = (row.top + row.bottom) / 2;
      text(lane.queue, picture.left - 12, middle, colours.ink, "bold");
    });
    text("overview", picture.left - 12, TOP + OVERVIEW / 2, colours.faint);
    text("memory", picture.left - 12, picture.memory - 10, colours.ink, "bold");
    const { most, step } = memoryScale();
    for (let level = 0; level <= most; level += step) {
      text(bytesText(level), picture.left - 12, memoryY(level), colours.faint);
    }
  }

  function text(value, x, y, colour, weight) {
    context.font = weight ? `${weight} ${FONT}` : FONT;
    context.fillStyle = colour;
    context.fillText(value, x, y);
    context.font = FONT;
  }

  function niceStep(least) {
    const power = 10 ** Math.floor(Math.log10(least));
    return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= least * (1 - 1e-9));
  }

  function drawAxis() {
    const step = niceStep(70 / scale());
    const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
    context.textAlign = "center";
    for (let i = Math.ceil(view.start / step); i * step <= view.end + 1e-9; i += 1) {
      const x = toX(i * step);
      line(x, picture.phases + PHASES, x, picture.axis + 4, colours.grid);
      text((i * step).toFixed(digits), x, picture.axis + 12, colours.faint);
    }
    text(data.words.time, (picture.left + right()) / 2, picture.axis + 26, colours.faint);
  }

  function line(x1, y1, x2, y2, colour) {
    context.strokeStyle = colour;
    context.beginPath();
    context.moveTo(x1, y1);
    context.lineTo(x2, y2);
    context.stroke();
  }

  function drawPhases() {
    for (const span of timeline.spans) {
      if (!shown(span)) continue;
      const from = Math.max(toX(span.start), picture.left), to = Math.min(toX(span.end), right());
      context.fillStyle = colours.panel;
      context.fillRect(from + 1, picture.phases, to - from - 2, PHASES);
      const length = `${span.phase}: ${(span.end - span.start).toFixed(1)} ${UNIT}`;
      const all = `${length}, ${span.exposed.toFixed(1)} of them exposed`;
      const label = fitting([all, length, span.phase], to - from - 16);
      context.textAlign = "left";
      text(label, from + 9, picture.phases + PHASES / 2, colours.ink, "bold");
      if (span.start > 0) line(toX(span.start), picture.phases, toX(span.start), picture.axis, colours.edge);
    }
  }

  const widths = new Map();
  function widthOf(value) {
    if (!widths.has(value)) widths.set(value, context.measureText(value).width);
    return widths.get(value);
  }
  const fitting = (candidates, width) => candidates.find((candidate) => widthOf(candidate) * 1.06 <= width) || "";

  /** `model.layers.3`, and the ends of it that have a number: what it may be shortened to. */
  function shortNames(name) {
    const parts = name.split(".");
    const tails = parts.map((_, i) => parts.slice(i).join("."));
    return tails.filter((tail) => tail === name || (!name.startsWith("(") && /\d/.test(tail)));
  }

  /** Bars of one unit that follow each other without a gap, as one; a collective is by itself. */
  function runsOf(bars) {
    const runs = [];
    for (const bar of bars) {
      const last = runs[runs.length - 1];
      if (last && bar.kind === "compute" && last.unit === bar.unit && last.phase === bar.phase && last.end === bar.start) {
        last.end = bar.end;
      } else {
        runs.push({ start: bar.start, end: bar.end, unit: bar.unit, name: bar.name, phase: bar.phase, bar });
      }
    }
    return runs;
  }
  for (const lane of lanes) lane.runs = runsOf(lane.bars);

  function drawBars(lane) {
    const row = picture.lanes[lane.index], height = row.bottom - row.top;
    line(picture.left, row.bottom + 0.5, right(), row.bottom + 0.5, colours.grid);
    for (const gap of lane.gaps) if (shown(gap)) hatch(toX(gap.start), row.top, toX(gap.end), row.bottom, dimmed(gap));
    for (const bar of lane.bars) {
      if (!shown(bar)) continue;
      const x = toX(bar.start), width = Math.max(toX(bar.end) - x, 0.75);
      context.globalAlpha = dimmed(bar) ? 0.15 : 1;
      context.fillStyle = fill(bar.unit);
      context.fillRect(x, row.top, width > 3 && bar.kind !== "compute" ? width - 0.75 : width, height);
    }
    context.globalAlpha = 1;
  }

  function drawNames(lane) {
    const row = picture.lanes[lane.index];
    context.textAlign = "center";
    const widest = new Map();
    for (const run of lane.runs) {
      if (!shown(run)) continue;
      const from = Math.max(toX(run.start), picture.left), to = Math.min(toX(run.end), right());
      if (to - from < 12 && lane !== computeLane) continue;
      const size = run.bar.num_bytes ? [`${run.name} · ${bytesText(run.bar.num_bytes)}`] : [];
      const names = run.name ? [...size, ...shortNames(run.name)] : [data.words["no unit"]];
      const label = fitting(names, to - from - 8);
      context.globalAlpha = matching !== null && !lane.bars.some((bar) => matching.has(bar) && bar.start < run.end && bar.end > run.start) ? 0.25 : 1;
      if (label) text(label, (from + to) / 2, (row.top + row.bottom) / 2, colours.ink);
      else if (lane === computeLane && run.unit) {
        const key = JSON.stringify([run.phase, run.unit]); // what a unit does in a phase may be in several runs
        if (to - from > (widest.get(key)?.width ?? -1)) widest.set(key, { x: (from + to) / 2, width: to - from, run });
      }
    }
    const outside = [...widest.values()].sort((a, b) => a.x - b.x);
    context.globalAlpha = 1;
    // Where names do not fit into the bars, every n-th unit of a kind has its name under them, n as small as the room allows.
    let every = 1;
    const kept = () => outside.filter(({ run }) => unitPlace.get(run.unit) % every === 0);
    const crowded = (names) => names.some((name, i) => i && name.run.phase === names[i - 1].run.phase
      && timeline.kinds[name.run.unit] === timeline.kinds[names[i - 1].run.unit] && collide(names[i - 1], name));
    while (crowded(kept()) && every < 4096) every *= 2;
    let last = null;
    for (const name of kept()) {
      const half = widthOf(name.run.name) / 2 - ROOM + 1;
      name.x = Math.max(picture.left + half, Math.min(name.x, right() - half));
      if (last && collide(last, name)) continue;
      line(name.x, row.bottom, name.x, row.bottom + 4, colours.edge);
      text(name.run.name, name.x, row.names, colours.faint);
      last = name;
    }
  }
  const collide = (a, b) => b.x - a.x < (widthOf(a.run.name) + widthOf(b.run.name)) / 2 + 8;

  /** The number of each unit within its kind. */
  const unitPlace = new Map();
  const unitKinds = new Map();
  for (const [unit, kind] of Object.entries(timeline.kinds)) {
    unitKinds.set(kind, [...(unitKinds.get(kind) || []), unit]);
    unitPlace.set(unit, unitKinds.get(kind).length - 1);
  }

  function hatch(x1, top, x2, bottom, faded) {
    context.save();
    context.globalAlpha = faded ? 0.25 : 1;
    context.strokeStyle = colours.exposed;
    const width = Math.max(x2 - x1, 0.75);
    if (width < 4) {
      context.fillStyle = colours.exposed;
      context.globalAlpha *= 0.75;
      context.fillRect(x1, top, width, bottom - top);
    } else {
      context.beginPath();
      context.rect(x1, top, width, bottom - top);
      context.clip();
      context.lineWidth = 1.6;
      context.beginPath();
      const height = bottom - top;
      // Lines lie on a grid of the whole plot, not of the gap, and only those in sight are drawn.
      const from = Math.max(x1, picture.left) - height, to = Math.min(x2, right());
      for (let x = Math.floor(from / 7) * 7; x <= to; x += 7) {
        context.moveTo(x, bottom);
        context.lineTo(x + height, top);
      }
      context.stroke();
      context.lineWidth = 1;
      context.strokeRect(x1 + 0.5, top + 0.5, width - 1, height - 1);
    }
    context.restore();
  }

  const MARK_SHAPES = { wait: "up", accumulate_grad: "diamond", keep_grads: "diamond", keep_shard: "diamond", free: "ring", flatten_grads: "square", cast_shard: "square", load_shard: "house-down", store_grad: "house-up", presence: "flat" };

  function markSize() { return Math.min(4.4, Math.max(1.4, 0.2 * scale())); }

  function drawMarks(lane) {
    for (const mark of lane.marks.filter(beside)) {
      context.globalAlpha = dimmed(mark) ? 0.12 : 1;
      drawShape(context, mark.kind, toX(mark.time), picture.lanes[lane.index].marks, markSize());
    }
    context.globalAlpha = 1;
  }

  function drawShape(target, kind, x, y, s) {
    target.beginPath();
    target.fillStyle = kind === "flatten_grads" ? colours.gradients : colours.ink;
    const shape = MARK_SHAPES[kind];
    if (shape === "ring") {
      target.arc(x, y, s * 0.85, 0, 2 * Math.PI);
      target.strokeStyle = colours.ink;
      target.lineWidth = 1.2;
      target.stroke();
      target.lineWidth = 1;
      return;
    }
    if (shape === "up") { target.moveTo(x - s, y + s); target.lineTo(x + s, y + s); target.lineTo(x, y - s); }
    else if (shape === "diamond") { target.moveTo(x, y - s * 1.1); target.lineTo(x + s * 1.1, y); target.lineTo(x, y + s * 1.1); target.lineTo(x - s * 1.1, y); }
    else if (shape.startsWith("house")) {
      const to = shape === "house-up" ? -s : s;
      target.moveTo(x - s * 0.85, y - to * 0.85); target.lineTo(x + s * 0.85, y - to * 0.85); target.lineTo(x + s * 0.85, y);
      target.lineTo(x, y + to); target.lineTo(x - s * 0.85, y);
    }
    else if (shape === "flat") target.rect(x - s, y - s * 0.4, 2 * s, s * 0.8);
    else target.rect(x - s * 0.85, y - s * 0.85, s * 1.7, s * 1.7);
    target.fill();
  }

  function drawArrows() {
    const seen = timeline.arrows.filter((arrow) => arrow.target_time >= view.start && arrow.source_time <= view.end);
    const place = new Map(lanes.map((lane) => [lane.queue, lane.index]));
    for (const kind of ["wait", "limit"]) {
      context.strokeStyle = colours.faint;
      context.globalAlpha = matching !== null ? 0.15 : seen.length > 300 ? 0.2 : 0.6;
      context.setLineDash(kind === "limit" && seen.length <= 300 ? [3, 3] : []); // many dashes are slow, and not seen
      context.beginPath();
      for (const arrow of seen) {
        if (arrow.kind !== kind) continue;
        const source = picture.lanes[place.get(arrow.source)], target = picture.lanes[place.get(arrow.target)];
        const down = source.top < target.top;
        const from = arrow.kind === "limit" ? source.marks : down ? source.bottom : source.top;
        const to = arrow.kind === "limit" ? target.bottom : target.marks;
        context.moveTo(toX(arrow.source_time), from);
        context.lineTo(toX(arrow.target_time), to);
      }
      context.stroke();
    }
    context.setLineDash([]);
    context.globalAlpha = 1;
  }

  // -- memory

  function memoryScale() {
    const peak = Math.max(1, ...[timeline.gathered, timeline.gradients].map((curve) => peakOf(curve)));
    let unit = 1;
    while (unit * 1024 <= peak && unit < 1024 ** 3) unit *= 1024;
    const step = Math.max(1, Math.round(niceStep(peak / 3 / unit) * unit));
    return { step, most: Math.ceil(peak / step) * step };
  }
  const peakOf = (curve) => curve.points.reduce((most, point) => Math.max(most, point[1]), 0);
  const memoryY = (bytes) => picture.axis - (bytes / memoryScale().most) * (MEMORY - 8);

  /** Of what happens at one time only a peak above both sides is drawn, as in the SVG. */
  function stepPath(curve) {
    const path = new Path2D(), points = curve.points;
    let before = points[0][1];
    path.moveTo(toX(points[0][0]), memoryY(before));
    for (let i = 0; i < points.length;) {
      const time = points[i][0], x = toX(time);
      let most = 0, last = 0;
      for (; i < points.length && points[i][0] === time; i += 1) {
        last = points[i][1];
        most = Math.max(most, last);
      }
      for (const bytes of most > Math.max(before, last) ? [most, last] : [last]) {
        path.lineTo(x, memoryY(before));
        path.lineTo(x, memoryY(bytes));
        before = bytes;
      }
    }
    path.lineTo(toX(END), memoryY(before));
    return path;
  }

  function drawMemory() {
    const { most, step } = memoryScale();
    for (let level = 0; level <= most; level += step) line(picture.left, memoryY(level), right(), memoryY(level), level ? colours.grid : colours.edge);
    const outline = stepPath(timeline.gathered), area = new Path2D(outline);
    area.lineTo(toX(END), picture.axis);
    area.lineTo(toX(0), picture.axis);
    context.fillStyle = colours.gathered;
    context.globalAlpha = 0.2;
    context.fill(area);
    if (timeline.resident_bytes) {
      context.globalAlpha = 0.28;
      context.fillRect(toX(0), memoryY(timeline.resident_bytes), toX(END) - toX(0), picture.axis - memoryY(timeline.resident_bytes));
    }
    context.globalAlpha = 1;
    context.lineWidth = 1.3;
    context.strokeStyle = colours.gathered;
    context.stroke(outline);
    if (peakOf(timeline.gradients)) {
      context.strokeStyle = colours.gradients;
      context.stroke(stepPath(timeline.gradients));
    }
    context.lineWidth = 1;
  }

  /** Bytes of a curve at a time: the last point that is not later. */
  function levelAt(curve, time) {
    let [low, high] = [0, curve.points.length];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (curve.points[middle][0] <= time) low = middle + 1; else high = middle;
    }
    return low ? curve.points[low - 1][1] : 0;
  }

  function drawOutline(item) {
    const row = picture.lanes[item.lane];
    context.strokeStyle = item === selected ? colours.accent : colours.ink;
    context.lineWidth = 2;
    if (item.shape === "mark") {
      const radius = markSize() + 3;
      context.beginPath();
      context.arc(toX(item.time), row.marks, radius, 0, 2 * Math.PI);
      context.stroke();
    } else {
      context.strokeRect(toX(item.start), row.top, Math.max(toX(item.end) - toX(item.start), 1), row.bottom - row.top);
    }
    context.lineWidth = 1;
  }

  // -- what is under the pointer

  function itemAt(x, y) {
    if (x < picture.left || x > right()) return null;
    const time = toTime(x);
    for (const lane of lanes) {
      const row = picture.lanes[lane.index];
      if (row.marks && Math.abs(y - row.marks) <= MARKS / 2) {
        let best = null, distance = 7;
        for (const mark of lane.marks) {
          const away = Math.abs(toX(mark.time) - x);
          if (away <= distance) [best, distance] = [mark, away];
        }
        return best;
      }
      if (y >= row.top && y <= row.bottom) {
        const near = 2 / scale(); // what is narrower than the pointer can be hit too
        const hit = [...lane.bars, ...lane.gaps].filter((item) => item.start - near <= time && time <= item.end + near);
        const away = (item) => Math.max(item.start - time, time - item.end, 0);
        return hit.sort((a, b) => away(a) - away(b) || (a.end - a.start) - (b.end - b.start))[0] || null;
      }
    }
    return null;
  }

  const tip = byId("tip");
  function showTip(x, y) {
    const item = itemAt(x, y);
    let lines = null;
    if (item) lines = [title(item), ...facts(item)];
    else if (x >= picture.left && x <= right() && y >= picture.memory && y <= picture.axis) {
      const time = toTime(x);
      if (time >= 0 && time <= END) {
        lines = [`memory at ${at(time)}`, `gathered ${bytesText(levelAt(timeline.gathered, time))}`, `gradient buffers ${bytesText(levelAt(timeline.gradients, time))}`];
      }
    }
    tip.hidden = !lines;
    if (lines) {
      tip.replaceChildren(element("b", "", lines[0]), ...lines.slice(1).map((value) => element("span", "", value)));
      const width = tip.offsetWidth, height = tip.offsetHeight;
      const leftwards = x + 16 + width > picture.width;
      tip.style.left = `${Math.max(0, leftwards ? x - width - 12 : x + 16)}px`;
      tip.style.top = `${y + 18 + height > picture.height ? Math.max(0, y - height - 10) : y + 18}px`;
    }
    if (item !== hovered) { hovered = item; redraw(); }
  }
  function hideTip() {
    tip.hidden = true;
    if (hovered) { hovered = null; redraw(); }
  }

  // -- zooming, panning, selecting

  function setView(start, end) {
    const length = Math.min(Math.max(end - start, Math.min(CLOSEST, END)), END);
    const middle = (start + end) / 2;
    view.start = Math.min(Math.max(middle - length / 2, 0), END - length);
    view.end = view.start + length;
    hideTip();
    redraw();
  }
  const pan = (share) => { const by = (view.end - view.start) * share; setView(view.start + by, view.end + by); };
  function zoom(factor, time = (view.start + view.end) / 2) {
    setView(time - (time - view.start) * factor, time + (view.end - time) * factor);
  }
  function zoomTo(start, end) { const room = Math.max((end - start) * 0.6, CLOSEST); setView(start - room, end + room); }

  const zoomed = () => view.end - view.start < END * (1 - 1e-9);
  const buttons = [];
  function button(label, description, action, enabled) {
    const made = element("button", "", label);
    made.type = "button";
    made.setAttribute("aria-label", description);
    made.title = description;
    made.addEventListener("click", action);
    buttons.push([made, enabled]);
    byId("zoom").append(made);
  }
  button("−", "Zoom out", () => zoom(1.6), zoomed);
  button("+", "Zoom in", () => zoom(1 / 1.6), () => view.end - view.start > CLOSEST * 1.001);
  button("◀", "Pan to earlier", () => pan(-0.5), () => view.start > 1e-9);
  button("▶", "Pan to later", () => pan(0.5), () => view.end < END - 1e-9);
  button("All", "Show the whole step", () => setView(0, END), zoomed);
  for (const span of timeline.spans) {
    const name = span.phase[0].toUpperCase() + span.phase.slice(1);
    if (timeline.spans.length > 1) button(name, `Show the ${span.phase} phase`, () => setView(span.start, span.end), () => true);
  }
  function updateButtons() { for (const [made, enabled] of buttons) made.disabled = !enabled(); }

  function select(item, { scroll = true, follow = true } = {}) {
    selected = item;
    const detail = byId("detail");
    if (item) {
      const lines = facts(item).map((value) => element("span", "", value));
      detail.replaceChildren(element("b", "", title(item)), element("p", "", ...lines), ...remarksOn(item));
      if (follow && (item.start < view.start || item.end > view.end)) {
        const length = Math.max(view.end - view.start, (item.end - item.start) * 1.2);
        const middle = (item.start + item.end) / 2;
        setView(middle - length / 2, middle + length / 2);
      }
    } else {
      detail.replaceChildren(element("p", "", element("span", "", "Nothing is selected: click a bar or a mark, or press an arrow key in the timeline.")));
    }
    for (const row of document.querySelectorAll("#operations-table tr.selected")) row.classList.remove("selected");
    const row = item && item.row && item.row.element;
    if (row) {
      row.classList.add("selected");
      const box = row.closest(".scroll");
      if (scroll && !row.hidden) box.scrollTop = row.offsetTop - box.clientHeight / 2;
    }
    redraw();
  }

  function position(event) {
    const box = plot.getBoundingClientRect();
    return [event.clientX - box.left - 1, event.clientY - box.top - 1];
  }

  plot.addEventListener("wheel", (event) => {
    const [x] = position(event);
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY) || event.shiftKey) {
      if (!zoomed()) return;
      event.preventDefault();
      pan((event.deltaX || event.deltaY) / (right() - picture.left));
    } else {
      if (event.deltaY > 0 && !zoomed()) return; // all is in sight: the page scrolls on
      event.preventDefault();
      zoom(1.0018 ** event.deltaY, toTime(Math.max(x, picture.left)));
    }
  }, { passive: false });

  let drag = null;
  plot.addEventListener("pointerdown", (event) => {
    if (event.button) return;
    const [x, y] = position(event);
    const overview = y <= TOP + OVERVIEW;
    drag = { x, start: view.start, end: view.end, moved: false, overview };
    plot.setPointerCapture(event.pointerId);
    if (overview) centre(x);
  });
  plot.addEventListener("pointermove", (event) => {
    const [x, y] = position(event);
    if (!drag) { showTip(x, y); return; }
    if (Math.abs(x - drag.x) > 3) drag.moved = true;
    if (drag.overview) centre(x);
    else if (drag.moved) {
      plot.classList.add("dragging");
      const by = (x - drag.x) / scale();
      setView(drag.start - by, drag.end - by);
    }
  });
  plot.addEventListener("pointerup", (event) => {
    const [x, y] = position(event);
    if (drag && !drag.moved && !drag.overview) select(itemAt(x, y), { follow: false });
    drag = null;
    plot.classList.remove("dragging");
  });
  plot.addEventListener("pointercancel", () => { drag = null; plot.classList.remove("dragging"); });
  plot.addEventListener("pointerleave", hideTip);
  plot.addEventListener("dblclick", (event) => {
    const item = itemAt(...position(event));
    if (item) zoomTo(item.start, item.end);
  });
  function centre(x) {
    const time = ((x - picture.left) / (right() - picture.left)) * END, half = (view.end - view.start) / 2;
    setView(time - half, time + half);
  }

  /** The item of a lane that is nearest in time. */
  function nearest(lane, time) {
    const away = (item) => Math.max(item.start - time, time - item.end, 0);
    return lane.items.reduce((best, item) => (!best || away(item) < away(best) ? item : best), null);
  }

  function step(along, across) {
    if (!selected) return nearest(computeLane, (view.start + view.end) / 2);
    if (along) return lanes[selected.lane].items[selected.place + along] || selected;
    for (let index = selected.lane + across; lanes[index]; index += across) {
      if (lanes[index].items.length) return nearest(lanes[index], (selected.start + selected.end) / 2);
    }
    return selected;
  }

  const KEYS = {
    "+": () => zoom(1 / 1.6, selected ? (selected.start + selected.end) / 2 : undefined),
    "=": () => KEYS["+"](),
    "-": () => zoom(1.6),
    "0": () => setView(0, END),
    Home: () => setView(0, view.end - view.start),
    End: () => setView(END - (view.end - view.start), END),
    ArrowLeft: (shift) => (shift ? pan(-0.2) : select(step(-1, 0))),
    ArrowRight: (shift) => (shift ? pan(0.2) : select(step(1, 0))),
    ArrowUp: () => select(step(0, -1)),
    ArrowDown: () => select(step(0, 1)),
    Enter: () => selected && zoomTo(selected.start, selected.end),
    Escape: () => select(null),
  };
  plot.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !Object.hasOwn(KEYS, event.key)) return;
    event.preventDefault();
    KEYS[event.key](event.shiftKey);
  });

  // -- the legend

  function drawLegend() {
    const legend = byId("legend");
    legend.replaceChildren();
    const sample = (label, paint) => {
      const canvas = element("canvas");
      const ratio = window.devicePixelRatio || 1;
      [canvas.width, canvas.height] = [22 * ratio, 14 * ratio];
      const target = canvas.getContext("2d");
      target.scale(ratio, ratio);
      paint(target);
      canvas.setAttribute("aria-hidden", "true");
      legend.append(element("li", "", canvas, label));
    };
    const hues = new Map();
    for (const [kind, units] of unitKinds) {
      const hue = data.hues[units[0]].slice(0, 3).join();
      hues.set(hue, [...(hues.get(hue) || []), [kind, units]]);
    }
    for (const found of hues.values()) {
      const units = found.flatMap((entry) => entry[1]).slice(0, 2);
      const label = found.length > 1 ? `${found.length} more kinds of unit` : found[0][0];
      sample(label.length > 40 ? `${label.slice(0, 39)}…` : label, (target) => {
        units.forEach((unit, i) => { target.fillStyle = fill(unit); target.fillRect((i * 22) / units.length, 1, 22 / units.length, 12); });
      });
    }
    if (computeLane.bars.some((bar) => !bar.unit)) sample(data.words["no unit"], (target) => { target.fillStyle = colours.none; target.fillRect(0, 1, 22, 12); });
    if (timeline.exposed.length) {
      sample("exposed: compute waits", (target) => {
        target.strokeStyle = colours.exposed;
        target.strokeRect(0.5, 1.5, 21, 11);
        target.lineWidth = 1.6;
        for (let x = -7; x < 22; x += 7) { target.beginPath(); target.moveTo(x, 13); target.lineTo(x + 12, 1); target.stroke(); }
      });
    }
    const marks = new Set(lanes.flatMap((lane) => lane.marks.map((mark) => mark.kind)));
    for (const [kind, label] of Object.entries(data.words.kinds)) {
      if (marks.has(kind)) sample(label, (target) => drawShape(target, kind, 11, 7, 4.4));
    }
    const arrows = new Set(timeline.arrows.map((arrow) => arrow.kind));
    for (const [kind, label, dash] of [["wait", "from a collective to its WAIT", []], ["limit", "AllGather held back to a FREE", [3, 3]]]) {
      if (arrows.has(kind)) sample(label, (target) => { target.strokeStyle = colours.faint; target.setLineDash(dash); target.beginPath(); target.moveTo(1, 12); target.lineTo(21, 2); target.stroke(); });
    }
    sample(timeline.resident_bytes ? "gathered bytes, darker: residents" : "gathered bytes", (target) => {
      target.fillStyle = target.strokeStyle = colours.gathered;
      target.globalAlpha = 0.2;
      target.fillRect(0, 3, 22, 11);
      target.globalAlpha = 1;
      target.strokeRect(-2, 3, 30, 20);
    });
    if (peakOf(timeline.gradients)) sample("gradient bytes", (target) => { target.fillStyle = colours.gradients; target.fillRect(0, 6, 22, 1.6); });
  }

  // -- tables

  const wordsOf = (...texts) => new Set(texts.flatMap((value) => value.toLowerCase().split(/\s+/)).filter(Boolean));

  function swatch(unit) {
    const made = element("span", "swatch");
    made.dataset.unit = unit;
    return made;
  }
  function paintSwatches() {
    for (const made of document.querySelectorAll(".swatch")) made.style.background = fill(made.dataset.unit);
  }

  function buildOperations() {
    const head = element("tr", "", ...["#", "phase", "queue", "op", "FlatParameter or unit", "bytes", "start", UNIT, "note"].map((label, i) => {
      const cell = element("th", [0, 5, 6, 7].includes(i) ? "number" : "", element("span", "", label));
      cell.scope = "col";
      return cell;
    }));
    const body = element("tbody");
    operations.forEach((row, index) => {
      const item = row.item;
      const unit = item ? ownerOf(item) : flatUnits.get(row.name) || "";
      const made = element("tr", "",
        element("td", "number", index + 1), element("td", "", row.phase), element("td", "", row.queue), element("td", "", row.op),
        element("td", "name", swatch(unit), row.name || (row.op === "FWD" || row.op === "GRAD" ? data.words["no unit"] : "")),
        element("td", "number", row.bytes ? bytesText(row.bytes) : ""), element("td", "number", item ? number(item.start) : ""),
        element("td", "number", item && item.shape === "bar" ? number(item.end - item.start) : ""), element("td", "", row.note));
      const next = operations[index + 1];
      if (next && next.phase !== row.phase) made.classList.add("phase");
      row.element = made;
      const kind = item && item.shape === "bar" ? data.words.kinds[item.kind] || "" : "";
      row.words = wordsOf(row.phase, row.queue, row.op, row.name, unit, row.note, kind);
      if (item) {
        made.tabIndex = -1;
        made.addEventListener("click", () => select(item, { scroll: false }));
      }
      body.append(made);
    });
    if (operations.length && operations[0].element) operations[0].element.tabIndex = 0;
    // One stop of the Tab key for the whole table; arrows go from row to row.
    body.addEventListener("keydown", (event) => {
      const at = operations.findIndex((row) => row.element === event.target);
      if (at < 0) return;
      if (event.key === "Enter" || event.key === " ") { event.preventDefault(); event.target.click(); return; }
      const by = { ArrowDown: 1, ArrowUp: -1 }[event.key];
      if (!by) return;
      event.preventDefault();
      let to = at + by;
      while (operations[to] && (operations[to].element.hidden || !operations[to].item)) to += by;
      if (!operations[to]) return;
      event.target.tabIndex = -1;
      operations[to].element.tabIndex = 0;
      operations[to].element.focus();
    });
    byId("operations-table").append(element("thead", "", head), body);
    if (!operations.length) body.append(element("tr", "", element("td", "empty", "No operation.")));
  }

  const COLUMNS = [
    ["FlatParameter", (unit) => unit.name], ["parameters", (unit) => unit.parameters.length], ["elements", (unit) => unit.numel],
    ["dtype", (unit) => unit.dtype], ["gathered as", (unit) => unit["gathered as"]], ["gathered", (unit) => unit["gathered bytes"]],
    ["shard a rank", (unit) => unit["shard bytes"]], ["notes", (unit) => unit.notes.join(" ")],
  ];
  const compare = (a, b) => (typeof a === "number" ? a - b : a.localeCompare(b, "en", { numeric: true }));

  function buildUnits() {
    const body = element("tbody");
    const rows = data.units.map((unit, index) => {
      const list = element("ul", "", ...unit.parameters.map(([name, shape, aliases]) => element("li", "", `${name} (${shape.join(", ")})${aliases.length ? `, tied to ${aliases.join(", ")}` : ""}`)));
      const inside = element("details", "", element("summary", "", counted(unit.parameters.length, "parameter")), list);
      const made = element("tr", "", element("td", "name", swatch(unit.unit), unit.name), element("td", "", inside), element("td", "number", whole(unit.numel)),
        element("td", "", unit.dtype), element("td", "", unit["gathered as"]), element("td", "number", bytesText(unit["gathered bytes"])),
        element("td", "number", bytesText(unit["shard bytes"])), element("td", "", ...unit.notes.map((note) => element("span", "tag", note))));
      const words = wordsOf(unit.name, unit.unit, unit.dtype, ...unit.notes, ...unit.parameters.flatMap(([name, , aliases]) => [name, ...aliases]));
      return { unit, index, element: made, words };
    });
    const heads = COLUMNS.map(([label, key], column) => {
      const press = element("button", "", label);
      press.type = "button";
      const cell = element("th", [2, 5, 6].includes(column) ? "number" : "", press);
      cell.scope = "col";
      press.addEventListener("click", () => {
        const order = cell.getAttribute("aria-sort") === "ascending" ? "descending" : "ascending";
        for (const other of heads) other.removeAttribute("aria-sort");
        cell.setAttribute("aria-sort", order);
        const sign = order === "ascending" ? 1 : -1;
        const sorted = [...rows].sort((a, b) => sign * compare(key(a.unit), key(b.unit)) || a.index - b.index);
        body.replaceChildren(...sorted.map((row) => row.element));
      });
      return cell;
    });
    body.append(...rows.map((row) => row.element));
    byId("units-table").append(element("thead", "", element("tr", "", ...heads)), body);
    return rows;
  }

  const CHANGES = { "-": "gone", "+": "new", "<": "moved", ">": "moved", " ": "", "…": "" };

  function buildPasses() {
    const list = byId("passes-list");
    for (const pass of data.passes) {
      const head = element("div", "pass", element("b", "name", pass.text), element("span", "", `${counted(pass.added, "node")} added`),
        element("span", "", `${whole(pass.removed)} removed`),
        element("span", "", `${whole(pass.moved)} moved`), element("span", "", `${(pass.seconds * 1000).toFixed(1)} ms`));
      const made = element("li", "", head);
      if (pass.remarks.length) {
        const missed = pass.remarks.filter((remark) => remark.kind === "missed").length;
        const label = `${counted(pass.remarks.length, "remark")}${missed ? `, ${whole(missed)} missed` : ""}`;
        const said = pass.remarks.map((remark) => element("li", "", element("span", remark.kind === "missed" ? "missed" : "", remark.kind), element("span", "name", remark.unit), element("span", "", remark.text)));
        made.append(element("details", "", element("summary", "", label), element("ul", "remarks", ...said)));
      }
      if (pass.changes.length) {
        const lines = pass.changes.map(([mark, line]) => element("span", CHANGES[mark], mark === "…" ? "  …\n" : `${mark} ${line}\n`));
        const label = `What changed: ${["-", "+", "<"].map((mark) => [pass.changes.filter((change) => change[0] === mark).length, CHANGES[mark]])
          .filter(([count]) => count).map(([count, word]) => `${counted(count, "line")} ${word}`).join(", ")}`;
        const shown = element("pre", "changes", ...lines);
        shown.tabIndex = 0;
        made.append(element("details", "", element("summary", "", label), shown));
      }
      list.append(made);
    }
    if (!data.passes.length) list.append(element("li", "", "No pass has run."));
  }

  // -- search

  let matches = [], current = -1;

  /** All words must be in a row: as a word of its own where some row has it so (`blocks.3` is not `blocks.30`), else within one. */
  function find() {
    const wanted = [...wordsOf(byId("search").value)];
    const tests = wanted.map((word) => {
      const known = [...operations, ...unitRows].some((row) => row.words.has(word));
      return (words) => (known ? words.has(word) : [...words].some((other) => other.includes(word)));
    });
    const holds = (words) => tests.every((test) => test(words));
    matches = [];
    for (const row of operations) {
      const hit = holds(row.words);
      row.element.hidden = !hit;
      if (hit && row.item) matches.push(row.item);
    }
    let units = 0;
    for (const row of unitRows) {
      row.element.hidden = !holds(row.words);
      if (!row.element.hidden) units += 1;
    }
    current = -1;
    matching = wanted.length ? new Set(matches) : null;
    const rows = operations.filter((row) => !row.element.hidden).length;
    byId("found").textContent = wanted.length ? `${counted(rows, "operation")}, ${counted(units, "unit")}` : "";
    byId("previous").disabled = byId("next").disabled = !wanted.length || !matches.length;
    redraw();
  }
  function jump(by) {
    if (!matches.length || matching === null) return;
    current = current < 0 ? (by > 0 ? 0 : matches.length - 1) : (current + by + matches.length) % matches.length;
    select(matches[current]);
  }
  byId("search").addEventListener("input", find);
  byId("search").addEventListener("keydown", (event) => {
    if (event.key === "Enter") { event.preventDefault(); jump(event.shiftKey ? -1 : 1); }
    if (event.key === "Escape") { event.target.value = ""; find(); }
  });
  byId("next").addEventListener("click", () => jump(1));
  byId("previous").addEventListener("click", () => jump(-1));
  document.addEventListener("keydown", (event) => {
    if (event.key !== "/" || event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input")) return;
    event.preventDefault();
    byId("search").focus();
    byId("search").select();
  });

  // -- start

  function paint() {
    readColours();
    place();
    drawLegend();
    paintSwatches();
    redraw();
  }
  byId("time").textContent = data.time;
  byId("summary").append(...data.summary.map(([label, value, note]) =>
    element("div", "", element("dt", "", label), element("dd", "value", value), element("dd", "note", note))));
  buildOperations();
  const unitRows = buildUnits();
  buildPasses();
  select(null);
  paint();
  draw();
  new ResizeObserver(() => { if (plot.clientWidth !== picture.width) { place(); redraw(); } }).observe(plot);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", paint);
  document.documentElement.dataset.ready = "true";
})();
