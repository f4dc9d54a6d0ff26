// The metrics of all runs, one plot for each.

const { runs } = JSON.parse(document.getElementById("data").textContent);
const single = runs.length === 1;
const group = uPlot.sync("curves");
const LAST = ["samples_per_second", "lr"];
const TITLES = new Map([["samples_per_second", ["throughput", "samples/s"]], ["lr", ["learning rate", ""]]]);
const SPLITS = ["test", "train", "step"];
const splits = [...new Set(runs.flatMap((run) => run.curves.map((curve) => curve.split)))]
  .sort((a, b) => (SPLITS.indexOf(a) + 1 || 9) - (SPLITS.indexOf(b) + 1 || 9));
const view = { axis: "step", zoom: null, hiddenRuns: new Set(), hiddenSplits: new Set() };
if (!single && splits.includes("test") && splits.includes("step")) view.hiddenSplits.add("step");

// Of one run splits differ in colour; of several, runs do, and splits in the kind of line.
function style(run, split) {
  const place = splits.indexOf(split);
  const fine = split === "step" && splits.length > 1;
  const kind = { width: fine ? 1 : 2, alpha: fine ? 0.55 : 1, dash: undefined };
  if (single) return { ...kind, variable: split === "test" ? "run-1" : split === "train" || split === "step" ? "run-0" : `run-${2 + place % 4}` };
  return { ...kind, variable: `run-${run % 6}`, dash: split === "train" ? [5, 4] : undefined };
}

function curvesOf(metric) {
  return runs.flatMap((run, at) => {
    let own = run.curves.filter((curve) => curve.metric === metric);
    // All lines of a moment have one learning rate.
    if (metric === "lr" && own.length > 1) own = [own.reduce((a, b) => (b.step.length > a.step.length ? b : a))];
    const styleOf = (split) => (metric === "lr" ? { ...style(at, "test"), ...(single ? { variable: "run-0" } : {}) } : style(at, split));
    return own.map((curve) => ({ ...curve, run: at, ...styleOf(curve.split) }));
  }).sort((a, b) => (SPLITS.indexOf(b.split) + 1 || 9) - (SPLITS.indexOf(a.split) + 1 || 9));
}

function visible(curve) {
  const split = view.hiddenSplits.has(curve.split) && curve.metric !== "lr";
  return !split && !view.hiddenRuns.has(curve.run);
}

function label(curve) {
  return single ? curve.split : `${runs[curve.run].name}, ${curve.split}`;
}

// Points in the order of x, without those that have no x.
function table(curve) {
  const xs = curve[view.axis];
  const order = [...xs.keys()].filter((at) => xs[at] !== null).sort((a, b) => xs[a] - xs[b]);
  const distinct = order.filter((at, place) => place + 1 === order.length || xs[order[place + 1]] !== xs[at]);
  return [distinct.map((at) => xs[at]), distinct.map((at) => curve.value[at])];
}

// The place of the point next to x; -1 where there is none. undefined stands where a curve has no point.
function nearest(u, series, idx) {
  const ys = u.data[series], xs = u.data[0], x = u.posToVal(u.cursor.left, "x");
  let left = idx, right = idx;
  while (left >= 0 && ys[left] === undefined) left -= 1;
  while (right < ys.length && ys[right] === undefined) right += 1;
  if (left < 0) return right < ys.length ? right : -1;
  if (right >= ys.length) return left;
  return x - xs[left] <= xs[right] - x ? left : right;
}

function read(u, shown) {
  const xs = u.data[0];
  const points = shown.map((curve, at) => [curve, nearest(u, at + 1, u.cursor.idx)]).filter(([, place]) => place >= 0);
  if (!points.length) return null;
  const x = u.posToVal(u.cursor.left, "x");
  const [, here] = points.reduce((a, b) => (Math.abs(xs[b[1]] - x) < Math.abs(xs[a[1]] - x) ? b : a));
  const rank = ([curve]) => splits.indexOf(curve.split) * runs.length + curve.run;
  const rows = points.sort((a, b) => rank(a) - rank(b)).map(([curve, place]) => ({
    sample: lineSample(curve),
    label: label(curve),
    value: exact(u.data[shown.indexOf(curve) + 1][place]),
    at: place === here ? "" : `at ${AXES[view.axis].read(xs[place])}`,
  }));
  const { title, read: written } = AXES[view.axis];
  return { where: `${title} ${written(xs[here])}`, rows };
}

// Names at the ends of the curves, moved apart where they would overlap.
function drawNames(u, shown, nameOf) {
  const { ctx, bbox } = u, ratio = devicePixelRatio;
  const ends = shown.map((curve, at) => {
    const ys = u.data[at + 1], last = ys.findLastIndex((y, place) => typeof y === "number" && u.data[0][place] <= u.scales.x.max);
    return { curve, y: last < 0 ? NaN : u.valToPos(ys[last], "y", true) };
  }).filter((end) => end.y >= bbox.top && end.y <= bbox.top + bbox.height && nameOf(end.curve)).sort((a, b) => a.y - b.y);
  const gap = 14 * ratio;
  for (let at = 1; at < ends.length; at += 1) ends[at].y = Math.max(ends[at].y, ends[at - 1].y + gap);
  let floor = bbox.top + bbox.height;
  for (const end of ends.reverse()) { end.y = Math.min(end.y, floor); floor = end.y - gap; }
  ctx.save();
  ctx.font = `${12 * ratio}px system-ui, sans-serif`;
  ctx.textAlign = "left";
  ctx.textBaseline = "middle";
  for (const { curve, y } of ends) {
    ctx.fillStyle = colour(curve.variable);
    ctx.fillText(nameOf(curve), bbox.left + bbox.width + 6 * ratio, y);
  }
  ctx.restore();
}

// Where ranks were lost, or joined: broken or dotted lines across the plot.
function drawChanges(u) {
  const { ctx, bbox } = u, ratio = devicePixelRatio, { min, max } = u.scales.x;
  ctx.save();
  ctx.strokeStyle = colour("edge");
  ctx.lineWidth = ratio;
  const kinds = [["losses", [4, 3]], ["joins", [1, 1]]];
  for (const [run, [kind, dash]] of runs.filter((each, at) => !view.hiddenRuns.has(at)).flatMap((run) => kinds.map((each) => [run, each]))) {
    ctx.setLineDash(dash.map((length) => length * ratio));
    for (const x of run[kind][view.axis]) {
      if (x === null || x < min || x > max) continue;
      const left = Math.round(u.valToPos(x, "x", true)) + ratio / 2;
      ctx.beginPath();
      ctx.moveTo(left, bbox.top);
      ctx.lineTo(left, bbox.top + bbox.height);
      ctx.stroke();
    }
  }
  ctx.restore();
}

function naming(plot, shown) {
  if (single) return { room: 40, nameOf: (curve) => (shown.length > 1 ? curve.split.slice(0, 5) : "") };
  if (runs.length > 4 || plot.width < NARROW) return { room: 20, nameOf: () => "" };
  const short = (name) => (name.length > 13 ? `${name.slice(0, 12)}…` : name);
  const first = shown.at(-1)?.split;
  return { room: 100, nameOf: (curve) => (curve.split === first ? short(runs[curve.run].name) : "") };
}

function buildCurves(plot, curves, isLog) {
  const shown = curves.filter(visible);
  const tables = shown.map(table);
  const data = tables.length ? uPlot.join(tables) : [[], []];
  const { room, nameOf } = naming(plot, shown);
  const first = data[0][0] ?? 0, last = data[0].at(-1) ?? 1;
  // From 0 on, but for what begins late, as after a resume elsewhere.
  const range = view.zoom ?? [first <= 0.5 * last ? 0 : first, Math.max(last, first + 1e-3)];
  const options = {
    height: 250,
    padding: [10, room, 0, 0],
    legend: { show: false },
    cursor: {
      y: false, sync: { key: group.key, scales: ["x", null] },
      drag: { setScale: false, x: true, y: false },
      dataIdx: (u, series, idx) => (series ? Math.max(0, nearest(u, series, idx)) : idx),
      points: { size: 7 },
      bind: { dblclick: () => () => zoom(null) },
    },
    scales: { x: { time: false, range }, y: { distr: isLog ? 3 : 1 } },
    axes: [xAxis(view.axis, range[1] - range[0]), yAxis()],
    series: [{}, ...shown.map((curve) => ({
      label: label(curve), stroke: colour(curve.variable), width: curve.width, alpha: curve.alpha, dash: curve.dash,
      points: { size: 5, fill: colour(curve.variable), ...(curve.step.length > 100 ? { show: false } : {}) },
    }))],
    hooks: {
      drawAxes: [drawChanges],
      draw: [(u) => drawNames(u, shown, nameOf)],
      setSelect: [(u) => {
        const { left, width } = u.select;
        if (width > 3) zoom([u.posToVal(left, "x"), u.posToVal(left + width, "x")]);
      }],
    },
  };
  return { options, data, read: (u) => read(u, shown) };
}

// The tests run faster than the training: each has a scale of its own.
function partsOf(metric) {
  const curves = curvesOf(metric), tests = curves.filter((curve) => curve.split === "test");
  if (metric !== "samples_per_second" || !tests.length || tests.length === curves.length) return [[metric, curves, ""]];
  return [[metric, curves.filter((curve) => curve.split !== "test"), " of training"], [`${metric}.test`, tests, " of tests"]];
}

function drawCurves(metric, [part, curves, of]) {
  const [plain, unit] = TITLES.get(metric) ?? [metric, ""];
  const title = plain + of;
  const figure = element("figure");
  figure.dataset.metric = part;
  const head = figure.appendChild(element("div", "head"));
  const name = head.appendChild(element("h3", "", title));
  if (unit) name.append(element("span", "unit", unit));
  let isLog = false;
  const host = figure.appendChild(element("div"));
  document.getElementById("charts").append(figure);
  const plot = new Plot(host, title, (own) => buildCurves(own, curves, isLog));
  if (curves.every((curve) => curve.value.every((value) => value === null || value > 0))) {
    const button = head.appendChild(element("button", "small", "log"));
    button.type = "button";
    button.setAttribute("aria-label", `${title}: logarithmic scale`);
    button.setAttribute("aria-pressed", "false");
    button.addEventListener("click", () => {
      isLog = !isLog;
      button.setAttribute("aria-pressed", String(isLog));
      plot.draw();
    });
  }
  for (const curve of curves.filter((each) => each.notFinite)) {
    const first = curve.step[curve.value.indexOf(null)];
    figure.append(element("figcaption", "", `${label(curve)}: not finite at ${curve.notFinite} of its points, first at step ${first}.`));
  }
  return plot;
}

const metrics = [...new Set(runs.flatMap((run) => run.curves.map((curve) => curve.metric)))];
const ordered = [...metrics.filter((name) => name === "loss"), ...metrics.filter((name) => name !== "loss" && !LAST.includes(name)), ...LAST.filter((name) => metrics.includes(name))];
const charts = ordered.flatMap((metric) => partsOf(metric).map((part) => drawCurves(metric, part)));

function zoom(range) {
  view.zoom = range;
  resetButton.hidden = range === null;
  for (const chart of charts) chart.draw();
}
