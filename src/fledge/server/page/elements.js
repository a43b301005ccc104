// Elements without markup in strings: whatever is put in stays text.

export function element(name, attributes, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

export function byId(id) {
  return document.getElementById(id);
}
