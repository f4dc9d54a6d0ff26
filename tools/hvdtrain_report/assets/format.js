// Elements, and how numbers are written.

function element(tag, className = "", text = "") {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text) made.textContent = text;
  return made;
}

// A piece of a curve, to tell which is meant.
function lineSample({ variable, width, alpha, dash }) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const line = svg.appendChild(document.createElementNS("http://www.w3.org/2000/svg", "line"));
  for (const [name, value] of Object.entries({ class: "sample", width: 20, height: 8 })) svg.setAttribute(name, value);
  const places = { x1: 0, x2: 20, y1: 4, y2: 4, "stroke-width": width, "stroke-opacity": alpha };
  for (const [name, value] of Object.entries(places)) line.setAttribute(name, value);
  if (dash) line.setAttribute("stroke-dasharray", dash.join(" "));
  line.style.stroke = `var(--${variable})`;
  return svg;
}

// What stands in the file, to the last digit.
function exact(value) {
  return value === null ? "not finite" : String(value);
}

function tick(value, increment) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size < 1e-3) return value.toExponential().replace(/(\.\d{2})\d+/, "$1");
  const [divisor, letter] = size >= 1e9 ? [1e9, "G"] : size >= 1e6 ? [1e6, "M"] : size >= 1e4 ? [1e3, "k"] : [1, ""];
  // As many digits as tell neighbours apart: 0.025 has three, 0.02 has two.
  const step = increment / divisor;
  let digits = 0;
  while (digits < 6 && Math.abs(step * 10 ** digits - Math.round(step * 10 ** digits)) > 1e-6) digits += 1;
  return (value / divisor).toFixed(digits) + letter;
}

const UNITS = [["s", 1], ["min", 60], ["h", 3600]];

// The unit in which so many seconds read best.
function unitOf(seconds) {
  return UNITS[seconds < 180 ? 0 : seconds < 10800 ? 1 : 2];
}

function duration(seconds) {
  const sign = seconds < 0 ? "-" : "";
  let left = Math.abs(seconds);
  if (left < 60) return `${sign}${left.toFixed(left < 10 ? 2 : 1)} s`;
  left = Math.round(left);
  const minutes = Math.floor(left / 60) % 60;
  if (left < 3600) return `${sign}${minutes} min ${left % 60} s`;
  return `${sign}${Math.floor(left / 3600)} h ${minutes} min`;
}

function percent(share) {
  return `${(100 * share).toFixed(1)} %`;
}

const AXES = {
  step: { title: "step", read: String },
  epoch: { title: "epoch", read: String },
  seconds: { title: "time", read: duration },
};

const SECONDS = [0.01, 0.1, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 18000, 36000, 86400, 172800, 432000, 864000];
