import { NumberInput } from "@mantine/core";

import { words } from "../../format";
import { right, Rows } from "../../parts/Rows";

interface Props {
  readonly values: Record<string, number>;
  readonly defaults: Record<string, number>;
  readonly meanings: Record<string, string>;
  readonly touched: Record<string, number>;
  readonly onChange: (touched: Record<string, number>) => void;
}

/** Numbers by name, to be changed where the sidecar takes changes. */
export function WeightTable(props: Props) {
  const { values, defaults, meanings, touched, onChange } = props;
  return (
    <Rows columns={["name", right("weight"), right("by default")]}>
      {Object.entries(values).map(([name, value]) => (
        <tr key={name}>
          <td>
            {words(name)}
            <div className="meaning dim wrap">{meanings[name]}</div>
          </td>
          <td className="right">
            <NumberInput
              size="xs"
              className="weight"
              hideControls
              aria-label={words(name)}
              value={touched[name] ?? value}
              onChange={(next) =>
                typeof next === "number" && onChange({ ...touched, [name]: next })
              }
            />
          </td>
          <td className="right dim">{defaults[name]}</td>
        </tr>
      ))}
    </Rows>
  );
}
