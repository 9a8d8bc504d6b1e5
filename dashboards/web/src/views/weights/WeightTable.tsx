import { words } from "../../format";

/** Numbers by name, and which of them somebody set. */
export function WeightTable(props: { values: Record<string, number>; defaults: Record<string, number> }) {
  return (
    <table className="rows">
      <thead>
        <tr>
          <th>name</th>
          <th className="right">weight</th>
          <th className="right">by default</th>
        </tr>
      </thead>
      <tbody>
        {Object.entries(props.values).map(([name, value]) => (
          <tr key={name}>
            <td>{words(name)}</td>
            <td className="right">{value === props.defaults[name] ? value : <b>{value}</b>}</td>
            <td className="right dim">{props.defaults[name]}</td>
          </tr>
        ))}
      </tbody>
    </table>
  );
}
