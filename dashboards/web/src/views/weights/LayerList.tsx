import { Checkbox } from "@mantine/core";

import { LayerKey } from "../../parts/LayerKey";

interface Props {
  readonly layers: readonly string[];
  readonly held: readonly string[];
  readonly onChange: (held: string[]) => void;
}

/** Layers from most to least precious, and which of them are protected. */
export function LayerList({ layers, held, onChange }: Props) {
  const toggle = (layer: string, on: boolean) =>
    onChange(layers.filter((each) => (each === layer ? on : held.includes(each))));
  return (
    <ol className="layers">
      {layers.map((layer) => (
        <li key={layer}>
          <Checkbox
            size="xs"
            checked={held.includes(layer)}
            onChange={(event) => toggle(layer, event.currentTarget.checked)}
            label={<LayerKey of={layer} />}
          />
        </li>
      ))}
    </ol>
  );
}
