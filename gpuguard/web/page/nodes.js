"use strict";
// Nodes of the page, made and renewed.  They get text (never markup): what a user calls a job stays a name.
const byId = (id) => document.getElementById(id);

// make("a", { href: "#gpu=3", class: "name" }, "GPU 3"): what is null, undefined or false is left out.
function make(tag, properties = {}, ...children) {
  const node = tag === "svg" || tag === "path" ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "style") Object.assign(node.style, value);  // the attribute is what the CSP forbids
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false && child !== ""));
  return node;
}

// Makes *parent* have *children*, and touches only what differs: focus, selected text and opened details stay.
const renew = (parent, ...children) => renewChildren(parent, make("div", {}, ...children));
function renewChildren(old, fresh) {
  const alike = (left, right) => left.nodeName === right.nodeName && left.dataset?.key === right.dataset?.key;
  let present = old.firstChild;
  for (const node of [...fresh.childNodes]) {
    let match = present;
    while (match && !alike(match, node)) match = match.nextSibling;
    if (!match) { old.insertBefore(node, present); continue; }
    while (present !== match) { present = present.nextSibling; present.previousSibling.remove(); }
    if (!match.isEqualNode(node)) renewNode(match, node);
    present = match.nextSibling;
  }
  while (present) { const next = present.nextSibling; present.remove(); present = next; }
}
function renewNode(old, fresh) {
  if (old.nodeType === Node.TEXT_NODE) { old.data = fresh.data; return; }
  for (const { name } of [...old.attributes]) {
    if (!fresh.hasAttribute(name) && name !== "open" && name !== "style") old.removeAttribute(name);
  }
  for (const { name, value } of [...fresh.attributes]) {
    if (name !== "style" && old.getAttribute(name) !== value) old.setAttribute(name, value);
  }
  if (fresh.style) old.style.cssText = fresh.style.cssText;
  renewChildren(old, fresh);
}

// Rows below *heads*, each { text, number?, wide? }.  On a phone each row becomes a block, so the roles are written out.
function renewTable(id, heads, rows) {
  const kind = (head) => (head.number ? "number" : head.wide ? "wide" : null);
  renew(byId(id),
    make("thead", { role: "rowgroup" }, make("tr", { role: "row" },
      heads.map((head) => make("th", { role: "columnheader", scope: "col", class: kind(head) }, head.text)))),
    make("tbody", { role: "rowgroup" }, rows.map((cells) => make("tr", { role: "row" },
      cells.map((cell, column) => make("td", { role: "cell", class: kind(heads[column]), "data-head": heads[column].text }, cell))))));
}
