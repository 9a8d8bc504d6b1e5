import { words } from "../../format";

/** What terms of scores, and rules, mean. */
export function Meanings({ of }: { of: Record<string, string> }) {
  const each = Object.entries(of);
  if (each.length === 0) return null;
  return (
    <dl className="meanings dim">
      {each.map(([name, meaning]) => (
        <div key={name}>
          <dt>{words(name)}</dt>
          <dd className="wrap">{meaning}</dd>
        </div>
      ))}
    </dl>
  );
}
