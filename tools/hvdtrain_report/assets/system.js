// What the machines did while they trained.

const SYSTEM = {
  cpu_percent: ["Processor", "%, mean of the ranks", 1],
  memory_bytes: ["Memory", "GiB, of the rank with the most", 2 ** 30],
  gpu_memory_bytes: ["GPU memory", "GiB, of the rank with the most", 2 ** 30],
};

function addSystem(column, ranks) {
  for (const [name, [title, unit, factor]] of Object.entries(SYSTEM)) {
    const values = ranks.system[name];
    if (values.every((value) => value === null)) continue;
    const ys = values.map((value) => (value === null ? null : value / factor));
    const host = figure(title, unit, column).appendChild(element("div"));
    new Plot(host, title, () => {
      const range = (u, low, high) => [0, Math.max(high ?? 0, 1e-3) * 1.1];
      const options = { ...timeOptions(ranks, 150, { range }, yAxis()), series: [{}, { stroke: colour("run-0"), width: 1.5, points: { show: ys.length < 3 } }] };
      const read = (u) => {
        const at = u.cursor.idx;
        return ys[at] === null ? null : { where: spanText(ranks, at), rows: [{ label: title, value: `${ys[at].toPrecision(4)} ${unit.split(",")[0]}` }] };
      };
      return { options, data: [[...ranks.end], ys], read };
    });
  }
}

for (const article of document.querySelectorAll("article.time")) {
  const { ranks } = runs[article.dataset.run];
  if (single) addLegend(article);
  const grid = (article.querySelector("details") ?? article).appendChild(element("div", "grid"));
  const [left, right] = ["column", "column"].map((name) => grid.appendChild(element("div", name)));
  addBars(left, ranks);
  addHeat(left, ranks);
  addShares(right, ranks);
  addSystem(right, ranks);
}
