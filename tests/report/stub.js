// A page without a browser: enough of a document for the report's script to run and to be asked.
"use strict";
const fs = require("node:fs");

const [dataFile, ...scripts] = process.argv.slice(2);
const drawn = [], saved = [], all = [];

class Node {
  constructor(tag) { Object.assign(this, { tag, children: [], dataset: {}, listeners: {}, attributes: {}, _text: "", clientWidth: 600, clientHeight: 400 }); this.style = { setProperty(name, value) { this[name] = value; } }; all.push(this); }
  set textContent(value) { this._text = String(value); this.children = []; }
  get textContent() { return this._text + this.children.map((child) => child.textContent ?? String(child)).join(" "); }
  append(...children) { this.children.push(...children); }
  appendChild(child) { this.children.push(child); return child; }
  replaceChildren(...children) { this.children = children; }
  addEventListener(name, act) { (this.listeners[name] ||= []).push(act); }
  setAttribute(name, value) { this.attributes[name] = value; }
  getBoundingClientRect() { return { left: 0, top: 0, width: 10, height: 10 }; }
  getContext() { return { fillRect() {} }; }
  scrollIntoView() {}
  querySelector(selector) { return find(this, (node) => selector === `.${node.className}`); }
  on() {}
}
function find(node, test) {
  for (const child of node.children) {
    if (!(child instanceof Node)) continue;
    if (test(child)) return child;
    const inside = find(child, test);
    if (inside) return inside;
  }
  return null;
}
const byId = {};
const get = (id) => (byId[id] ||= new Node(`#${id}`));
get("report-data").textContent = fs.readFileSync(dataFile, "utf8");
const bodies = {};
globalThis.document = {
  documentElement: new Node("html"), body: new Node("body"),
  getElementById: get, createElement: (tag) => new Node(tag),
  querySelector: (selector) => (bodies[selector.split(" ")[0].slice(1)] ||= new Node("body")), querySelectorAll: () => [],
};
globalThis.getComputedStyle = () => ({ getPropertyValue: () => "#888888", fontFamily: "sans" });
globalThis.innerHeight = 800;
globalThis.innerWidth = 1200;
globalThis.IntersectionObserver = class { constructor(act) { this.act = act; } observe() { setTimeout(() => this.act([{ isIntersecting: true }]), 0); } };
globalThis.Plotly = { react: async (plot, traces, layout) => { drawn.push({ traces: traces.length, layout: Object.keys(layout).length }); }, purge() {}, relayout: async () => {}, downloadImage: (plot, options) => saved.push(options) };
const failures = [];
process.on("unhandledRejection", (error) => failures.push(String(error.stack || error)));
process.on("uncaughtException", (error) => failures.push(String(error.stack || error)));

(0, eval)(scripts.map((name) => fs.readFileSync(name, "utf8")).join("\n"));
setTimeout(() => {
  for (const node of all) if (node.className === "save") node.listeners.click.forEach((act) => act());
  const text = Object.fromEntries(Object.entries(bodies).map(([id, node]) => [id, node.textContent]));
  const options = all.filter((node) => node.tag === "option").map((node) => node.textContent);
  process.stdout.write(JSON.stringify({ failures, drawn: drawn.length, saved, text, options, note: get("subsampled").textContent }));
}, 1500);
