// Numbers and text as people read them. Text of a run is only ever shown through `visible`.

const PICTURES = 0x2400;

/** Control characters, halves of characters and marks that turn the direction of text as signs that can be seen. */
export function visible(text) {
  return String(text).replace(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\p{Cs}]/gu, (sign) => {
    const code = sign.codePointAt(0);
    if (code < 0x20) return String.fromCharCode(PICTURES + code);
    if (code === 0x7f) return "\u2421";
    return `<U+${code.toString(16).toUpperCase().padStart(4, "0")}>`;
  });
}

/** At most four significant digits. */
export function figure(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "\u2013";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value) && Math.abs(value) < 1e7) return String(value);
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(2);
  return String(Number(value.toPrecision(4)));
}

export function seconds(value) {
  if (value === null || value === undefined) return "\u2013";
  if (Math.abs(value) >= 100) return `${value.toFixed(0)} s`;
  if (Math.abs(value) >= 1) return `${value.toFixed(2)} s`;
  return `${(value * 1000).toFixed(value < 0.01 ? 2 : 0)} ms`;
}

export function bytes(value) {
  if (value === null || value === undefined) return "\u2013";
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (Math.abs(value) >= 1000 && unit < units.length - 1) { value /= 1000; unit += 1; }
  return `${unit ? value.toPrecision(3) : value} ${units[unit]}`;
}

export function clock(at) {
  return new Date(at * 1000).toLocaleTimeString([], { hour12: false });
}

/** Colours that differ for many eyes, in light and dark (Okabe and Ito's, without yellow). */
export const COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#8c6bb1", "#6b7280"];

export function colourOf(number) {
  return COLOURS[number % COLOURS.length];
}
