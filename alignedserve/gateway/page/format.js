const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const one = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });

export const NONE = "–";

export function number(value) {
  if (value === null) return NONE;
  return (value < 10 ? one : whole).format(value);
}

export const count = (value, noun) => `${whole.format(value)} ${noun}${value === 1 ? "" : "s"}`;

export function percent(share) {
  if (share === null) return NONE;
  // A share below 1 is not rounded up to 100 %.
  return `${one.format(Math.floor(share * 1000) / 10)} %`;
}

export function duration(seconds) {
  if (seconds < 1) return `${number(seconds * 1000)} ms`;
  return `${one.format(seconds)} s`;
}

export function age(seconds) {
  if (seconds < 60) return `${whole.format(Math.max(Math.floor(seconds), 0))} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} days`;
}

export const clock = (date) => date.toLocaleTimeString("en-GB");
