// A uPlot that fits its place, follows the theme, and is read by mouse, finger and keyboard.

const NARROW = 420;

class Plot {
  // build(plot) returns {options, data, read}; read(u) returns {where, rows}, or null.
  constructor(host, label, build) {
    this.host = host;
    this.build = build;
    this.row = 0;
    host.classList.add("plot");
    host.tabIndex = 0;
    host.setAttribute("role", "group");
    host.setAttribute("aria-roledescription", "chart");
    host.setAttribute("aria-label", `${label}. Arrow keys read its values.`);
    this.reading = new Reading(host);
    this.listen();
    plots.add(this);
    this.draw();
    // In the next frame: a plot that is drawn anew changes sizes while they are being observed.
    new ResizeObserver(() => requestAnimationFrame(() => this.fit())).observe(host);
  }

  draw() {
    this.reading.hide();
    this.u?.destroy();
    this.u = null;
    this.width = this.host.clientWidth;
    if (!this.width) return;
    const { options, data, read } = this.build(this);
    this.read = read;
    const hooks = { ...options.hooks, setCursor: [() => this.show()] };
    // A mouse that is elsewhere must not take away what a finger reads.
    const mouseleave = (u, target, handler) => (event) => (this.finger ? null : handler(event));
    const cursor = { ...options.cursor, bind: { ...options.cursor.bind, mouseleave } };
    this.u = new uPlot({ ...options, cursor, width: this.width, hooks }, data, this.host);
    this.u.over.addEventListener("pointermove", (event) => this.touch(event));
    this.u.over.addEventListener("pointerdown", (event) => this.touch(event));
  }

  fit() {
    if (this.host.clientWidth !== this.width) this.draw();
  }

  listen() {
    const { host } = this;
    host.addEventListener("pointerenter", (event) => {
      this.active = true;
      this.finger = event.pointerType !== "mouse";
    });
    host.addEventListener("pointerleave", (event) => {
      if (event.pointerType === "mouse") this.leave();
    });
    host.addEventListener("keydown", (event) => this.press(event));
    host.addEventListener("blur", () => this.leave());
  }

  leave() {
    this.active = false;
    this.reading.hide();
    this.u?.setCursor({ left: -10, top: -10 });
  }

  touch(event) {
    if (event.pointerType === "mouse") return;
    for (const other of plots) if (other !== this && other.active) other.leave();
    this.active = true;
    const box = this.u.over.getBoundingClientRect();
    this.u.setCursor({ left: event.clientX - box.left, top: event.clientY - box.top });
  }

  show() {
    const { u } = this;
    if (!u) return;
    const found = this.active && u.cursor.left >= 0 && u.cursor.idx !== null ? this.read(u) : null;
    if (!found) this.reading.hide();
    else this.reading.show(u.over.offsetLeft + u.cursor.left, found.where, found.rows);
  }

  press(event) {
    const { u } = this;
    if (!u || event.target !== this.host || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "Escape") return this.leave();
    const xs = u.data[0], { min, max } = u.scales.x;
    const first = xs.findIndex((x) => x >= min), last = xs.findLastIndex((x) => x <= max);
    const page = Math.max(1, Math.round((last - first) / 20));
    const moves = { ArrowLeft: -1, ArrowRight: 1, PageUp: -page, PageDown: page, Home: -Infinity, End: Infinity };
    const rows = { ArrowUp: -1, ArrowDown: 1 };
    if (event.key in moves) {
      const idle = !this.active || u.cursor.idx === null || u.cursor.left < 0;
      const to = idle ? (moves[event.key] > 0 ? first : last) : u.cursor.idx + moves[event.key];
      this.place = Math.max(first, Math.min(last, event.key === "Home" ? first : event.key === "End" ? last : to));
    } else if (event.key in rows && this.rows) {
      this.row = Math.max(0, Math.min(this.rows - 1, this.row + rows[event.key]));
      this.place ??= first;
    } else return;
    event.preventDefault();
    this.active = true;
    const top = this.rows ? u.valToPos(this.row + 0.5, "y") : u.over.clientHeight / 2;
    u.setCursor({ left: u.valToPos(xs[this.place], "x"), top });
    this.reading.speak();
  }
}

// An axis of x: `kind` is one of AXES.
function xAxis(kind, span) {
  const [unit, factor] = kind === "seconds" ? unitOf(span) : ["", 1];
  return {
    ...inks(),
    label: kind === "seconds" ? `time, ${unit}` : AXES[kind].title,
    labelSize: 20, labelGap: 0, size: 28, gap: 6, space: 64,
    ...(kind === "seconds" ? { incrs: SECONDS } : {}),
    ...(kind === "step" ? { incrs: undefined } : {}),
    values: (u, splits, axis, space, increment) => splits.map((x) => tick(x / factor, increment / factor)),
    grid: { show: false },
    ticks: { stroke: colour("line"), size: 5, width: 1 },
  };
}

function yAxis(extra = {}) {
  return {
    ...inks(),
    size: 52, gap: 6, space: 36,
    values: (u, splits, axis, space, increment) => splits.map((y) => (y === null ? "" : tick(y, increment))),
    grid: { stroke: colour("line"), width: 1 },
    ticks: { show: false },
    ...extra,
  };
}

function inks() {
  const font = '12px system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif';
  return { stroke: colour("muted"), font, labelFont: font };
}
