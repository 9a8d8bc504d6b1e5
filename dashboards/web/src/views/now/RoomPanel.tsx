import { useEngineNames } from "../../api/engineNames";
import type { RoomView } from "../../api/types";
import { duration, whole } from "../../format";
import { Panel } from "../../parts/Panel";
import { right, Rows } from "../../parts/Rows";

/** Who waits until there is room for its context, or did lately, engine by engine. */
export function RoomPanel({ rooms }: { rooms: readonly RoomView[] }) {
  const nameOf = useEngineNames();
  return (
    <Panel title="Waiting for room" note="new sessions only">
      <Rows columns={["engine", right("wait"), right("oldest"), right("fit"), right("live")]}>
        {rooms.map((room) => (
          <tr key={room.engine}>
            <td className="wrap">{nameOf(room.engine)}</td>
            <td className="right">{whole(room.waiting)}</td>
            <td className="right">{room.waiting > 0 ? duration(room.oldest_s) : "–"}</td>
            <td className="right">{whole(room.fitting)}</td>
            <td className="right">{whole(room.live)}</td>
          </tr>
        ))}
      </Rows>
      {rooms.map((room) => (
        <p className="dim wrap" key={room.engine}>
          {rooms.length > 1 && `${nameOf(room.engine)}: `}
          {room.sentence}
        </p>
      ))}
    </Panel>
  );
}
