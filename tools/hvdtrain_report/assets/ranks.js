// Where the time of the ranks went: in total, over time, and against the median rank.

const PARTS = ["compute", "waiting", "moving"];
const FEW = 32;
const ENDS = 12;

function figure(title, unit, parent) {
  const made = parent.appendChild(element("figure"));
  const head = made.appendChild(element("div", "head"));
  const name = head.appendChild(element("h3", "", title));
  if (unit) name.append(element("span", "unit", unit));
  return made;
}

function addLegend(article) {
  const legend = article.appendChild(element("div", "legend"));
  for (const [part, text] of [["compute", "compute"], ["waiting", "waiting for other ranks"], ["moving", "moving data"]]) {
    const item = legend.appendChild(element("span"));
    item.append(element("i", `swatch ${part}`), text);
  }
}

function bar(times, longest) {
  const made = element("div", "bar");
  PARTS.forEach((part, at) => {
    const piece = made.appendChild(element("i", part));
    piece.style.width = `${100 * times[at] / longest}%`;
  });
  return made;
}

function addBars(article, ranks) {
  const size = ranks.totals[0].length;
  const sums = ranks.totals[0].map((_, rank) => PARTS.reduce((sum, _part, at) => sum + ranks.totals[at][rank], 0));
  const longest = Math.max(...sums, 1);
  const [unit, factor] = unitOf(longest / 1000 / 2);
  const order = [...sums.keys()];
  if (size > FEW) order.sort((a, b) => ranks.totals[0][b] - ranks.totals[0][a]);
  const slowest = ranks.totals[0].indexOf(Math.max(...ranks.totals[0]));
  const made = figure("Each rank", size > FEW ? `${unit}, longest compute first` : unit, article);
  const table = made.appendChild(element("table", "bars"));
  const head = table.createTHead().insertRow();
  for (const [className, text] of [["rank", "rank"], ["", ""], ...PARTS.map((part) => ["number", part])]) {
    const cell = element("th", className, text);
    cell.scope = "col";
    head.append(cell);
  }
  const body = table.createTBody();
  const fill = (shown, left) => {
    body.replaceChildren();
    shown.forEach((rank, place) => {
      if (left && place === ENDS) {
        const gap = body.insertRow();
        gap.className = "gap";
        Object.assign(gap.insertCell(), { colSpan: 5, textContent: `${left} ranks between` });
      }
      const times = ranks.totals.map((part) => part[rank]);
      const row = body.insertRow();
      if (rank === slowest && size > 1) row.className = "slowest";
      row.append(element("th", "rank", String(rank)));
      row.lastChild.scope = "row";
      row.insertCell().append(bar(times, longest));
      for (const time of times) row.append(element("td", "number", (time / 1000 / factor).toFixed(1)));
    });
  };
  if (size <= FEW) return fill(order, 0);
  fill([...order.slice(0, ENDS), ...order.slice(-ENDS)], size - 2 * ENDS);
  const more = made.appendChild(element("button", "more", `Show all ${size} ranks`));
  more.type = "button";
  more.addEventListener("click", () => { fill(order, 0); more.remove(); });
}

function spanText(ranks, at) {
  return `${duration(ranks.start[at])} to ${duration(ranks.end[at])}, step ${ranks.step[at]}`;
}

// The span in which a time lies; null between spans.
function spanAt(ranks, time) {
  const at = ranks.end.findIndex((end) => end >= time);
  return at >= 0 && ranks.start[at] <= time ? at : null;
}

function timeScale(ranks) {
  return { time: false, range: [Math.min(ranks.start[0], ranks.end[0]), ranks.end.at(-1)] };
}

function timeOptions(ranks, height, y, axis) {
  const [low, high] = timeScale(ranks).range;
  return {
    height, padding: [8, 20, 0, 0], legend: { show: false },
    cursor: { y: false, drag: { x: false, y: false, setScale: false }, points: { show: false } },
    scales: { x: timeScale(ranks), y },
    axes: [xAxis("seconds", high - low), axis],
  };
}

function sharesOf(ranks, rank) {
  return ranks.milliseconds.map((parts) => {
    const sums = parts.map((times) => (rank === null ? times.reduce((a, b) => a + b, 0) : times[rank] ?? 0));
    const total = sums.reduce((a, b) => a + b, 0);
    return sums.map((sum) => (total ? sum / total : 0));
  });
}

// Steps at the starts of spans; a null where nothing was recorded for a while.
function stacked(ranks, shares) {
  const data = [[], [], [], []];
  const push = (x, values) => [x, ...values].forEach((value, at) => data[at].push(value));
  shares.forEach(([compute, waiting, moving], at) => {
    push(ranks.start[at], [compute + waiting + moving, compute + waiting, compute].map((sum) => 100 * sum));
    const next = ranks.start[at + 1] ?? Infinity, end = ranks.end[at];
    if (next - end < 0.25 * (end - ranks.start[at])) return;
    push(end, data.slice(1).map((column) => column.at(-1)));
    push(end + 1e-6, [null, null, null]);
  });
  return data;
}

function addShares(article, ranks) {
  const made = figure("Over time", "share of the time, %", article);
  const size = ranks.totals[0].length;
  let rank = null;
  const host = element("div");
  const plot = () => new Plot(host, "Share of compute, waiting and moving over time", () => {
    const shares = sharesOf(ranks, rank);
    const layer = (part) => ({ fill: colour(part), width: 0, points: { show: false }, paths: uPlot.paths.stepped({ align: 1 }) });
    const options = { ...timeOptions(ranks, 190, { range: [0, 100] }, yAxis()), series: [{}, layer("moving"), layer("waiting"), layer("compute")] };
    const read = (u) => {
      const at = spanAt(ranks, u.posToVal(u.cursor.left + 0.01, "x"));
      if (at === null) return null;
      const rows = PARTS.map((part, place) => ({ sample: element("span", `swatch ${part}`), label: part, value: percent(shares[at][place]) }));
      return { where: spanText(ranks, at), rows };
    };
    return { options, data: stacked(ranks, shares), read };
  });
  if (size > 1) {
    const select = made.querySelector(".head").appendChild(element("select"));
    select.setAttribute("aria-label", "Of which rank");
    select.add(new Option("all ranks", ""));
    for (let each = 0; each < size; each += 1) select.add(new Option(`rank ${each}`, each));
    select.addEventListener("change", () => { rank = select.value === "" ? null : Number(select.value); drawn.draw(); });
  }
  made.append(host);
  const drawn = plot();
}

// For each span how much longer than the median rank each rank computed.
function excesses(ranks) {
  return ranks.milliseconds.map(([compute]) => {
    const sorted = [...compute].sort((a, b) => a - b), median = sorted[(sorted.length - 1) >> 1];
    return compute.map((time) => (median ? time / median - 1 : 0));
  });
}

function addHeat(article, ranks) {
  const size = ranks.totals[0].length;
  if (size < 3) return;  // of two, one is the median
  const found = excesses(ranks);
  const rows = Math.min(size, 240);
  const firstOf = (row) => Math.floor(row * size / rows);
  // The slowest of the ranks that share a row.
  const worst = (at, row) => {
    let rank = firstOf(row);
    for (let each = rank; each < firstOf(row + 1); each += 1) if (found[at][each] > found[at][rank]) rank = each;
    return rank;
  };
  const most = Math.max(0.1, ...found.map((each) => Math.max(...each)));
  const made = figure("Slower than the median rank", "by rank and time", article);
  const host = made.appendChild(element("div"));
  const paint = (u) => {
    const { ctx } = u;
    ctx.save();
    ctx.fillStyle = colour("run-1");
    found.forEach((_, at) => {
      const left = Math.round(u.valToPos(ranks.start[at], "x", true)), right = Math.round(u.valToPos(ranks.end[at], "x", true));
      for (let row = 0; row < rows; row += 1) {
        const excess = found[at][worst(at, row)];
        if (excess <= 0) continue;
        const top = Math.round(u.valToPos(row, "y", true)), bottom = Math.round(u.valToPos(row + 1, "y", true));
        ctx.globalAlpha = Math.min(1, excess / most);
        ctx.fillRect(left, top, Math.max(1, right - left), Math.max(1, bottom - top));
      }
    });
    ctx.restore();
  };
  const plot = new Plot(host, "How much longer than the median rank each rank computed, by rank and time", () => {
    const height = Math.max(96, Math.min(300, 18 * rows)) + 56;
    const between = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000].find((each) => each / size * (height - 56) >= 18);
    const named = [];
    for (let rank = 0; rank < size; rank += between) named.push(rank);
    // A name stands at the middle of its row.
    const rankAxis = yAxis({ grid: { show: false }, splits: () => named.map((rank) => Math.floor(rank * rows / size) + 0.5), values: () => named });
    const options = { ...timeOptions(ranks, height, { range: [0, rows], dir: -1 }, rankAxis), series: [{}, { show: true, points: { show: false } }], hooks: { draw: [paint] } };
    const read = (u) => {
      const at = spanAt(ranks, u.posToVal(u.cursor.left + 0.01, "x"));
      const row = Math.floor(u.posToVal(u.cursor.top, "y"));
      if (at === null || row < 0 || row >= rows) return null;
      const rank = worst(at, row);
      const sign = found[at][rank] < 0 ? "" : "+";
      return { where: `${spanText(ranks, at)}, rank ${rank}`, rows: [
        { label: "against the median rank", value: sign + percent(found[at][rank]) },
        ...PARTS.map((part, place) => ({ sample: element("span", `swatch ${part}`), label: part, value: `${(ranks.milliseconds[at][place][rank] / 1000).toFixed(2)} s` })),
      ] };
    };
    return { options, data: [[...ranks.start], ranks.start.map(() => null)], read };
  });
  plot.rows = rows;
  const shared = rows < size ? ` Up to ${Math.ceil(size / rows)} ranks share a row, which shows the slowest of them.` : "";
  made.append(element("figcaption", "", `Blank: no longer than the median rank. Full shade: ${percent(most)} longer.${shared}`));
}

// Runs side by side: one bar for all ranks of each.
function addOverview() {
  const place = document.getElementById("overview");
  if (!place) return;
  addLegend(place);
  const made = place.appendChild(element("table", "bars"));
  const head = made.createTHead().insertRow();
  for (const [className, text] of [["name", "run, %"], ["", ""], ...PARTS.map((part) => ["number", part])]) {
    head.append(element("th", className, text));
    head.lastChild.scope = "col";
  }
  const body = made.createTBody();
  runs.forEach((run, at) => {
    if (!run.ranks) return;
    const sums = run.ranks.totals.map((part) => part.reduce((a, b) => a + b, 0));
    const total = sums.reduce((a, b) => a + b, 0) || 1;
    const row = body.insertRow();
    const name = row.appendChild(element("th", "name"));
    name.scope = "row";
    name.append(element("span", `swatch run-${at % 6}`), element("bdi", "", run.name));
    row.insertCell().append(bar(sums, total));
    for (const sum of sums) row.append(element("td", "number", (100 * sum / total).toFixed(1)));
  });
}
addOverview();
