// Confusion matrices: as a table, or as a picture where there are many classes.

const MANY = 24;

function shade(cell, sum, isRight) {
  const share = sum ? Math.sqrt(Math.max(0, cell) / sum) : 0;
  return `color-mix(in srgb, var(--${isRight ? "run-0" : "run-1"}) ${Math.round(45 * share)}%, transparent)`;
}

function addCells(article, rows) {
  const wide = article.appendChild(element("div", "wide"));
  wide.tabIndex = 0;
  wide.setAttribute("role", "region");
  wide.setAttribute("aria-label", "Confusion matrix");
  const table = wide.appendChild(element("table", "cells"));
  const head = table.createTHead().insertRow();
  head.append(element("th"), ...rows.map((_, name) => element("th", "", String(name))));
  for (const cell of head.cells) cell.scope = "col";
  const body = table.createTBody();
  rows.forEach((cells, at) => {
    const row = body.insertRow();
    row.append(element("th", "", String(at)));
    row.lastChild.scope = "row";
    const sum = cells.reduce((a, b) => a + b, 0);
    cells.forEach((cell, place) => {
      const made = row.insertCell();
      made.textContent = cell || "·";
      if (!cell) made.className = "none";
      else made.style.background = shade(cell, sum, at === place);
      made.title = `true ${at}, predicted ${place}: ${exact(cell)}`;
    });
  });
}

// One pixel for each cell, enlarged by the browser.
function addPicture(article, rows) {
  const canvas = article.appendChild(element("canvas"));
  const says = article.appendChild(element("p", "note", "Point at a cell to read it."));
  canvas.width = canvas.height = rows.length;
  const draw = () => {
    const context = canvas.getContext("2d");
    context.clearRect(0, 0, rows.length, rows.length);
    rows.forEach((cells, at) => {
      const sum = cells.reduce((a, b) => a + b, 0);
      cells.forEach((cell, place) => {
        if (cell <= 0) return;
        context.globalAlpha = Math.sqrt(cell / sum);
        context.fillStyle = colour(at === place ? "run-0" : "run-1");
        context.fillRect(place, at, 1, 1);
      });
    });
  };
  plots.add({ draw });
  draw();
  canvas.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect();
    const [place, at] = [event.clientX - box.left, event.clientY - box.top].map((way) => Math.max(0, Math.min(rows.length - 1, Math.floor(way / box.width * rows.length))));
    says.textContent = `true ${at}, predicted ${place}: ${exact(rows[at][place])}`;
  });
}

for (const article of document.querySelectorAll("article.confusion")) {
  const { rows } = runs[article.dataset.run].matrices[article.dataset.matrix];
  if (rows.length <= MANY) addCells(article, rows);
  else addPicture(article, rows);
}
