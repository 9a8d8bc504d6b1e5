import { Select } from "@mantine/core";

import { useEngineNames } from "../api/engineNames";
import { change } from "../route";

/** Which engine a view is about; not there where there is but one. */
export function EnginePicker(props: { engines: readonly string[]; value: string | null }) {
  const nameOf = useEngineNames();
  if (props.engines.length < 2) return null;
  return (
    <Select
      size="xs"
      aria-label="Engine"
      data={props.engines.map((id) => ({ value: id, label: nameOf(id) }))}
      value={props.value}
      allowDeselect={false}
      onChange={(engine) => change({ engine })}
    />
  );
}
