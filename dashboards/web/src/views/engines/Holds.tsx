import type { AdmissionView } from "../../api/types";
import { whole } from "../../format";
import { Facts } from "../../parts/Facts";
import { right, Rows } from "../../parts/Rows";

/** Whom an engine holds until there is room, and why those whom it held wait no longer. */
export function Holds({ admission }: { admission: AdmissionView }) {
  return (
    <div className="pool" role="group" aria-label="Admission">
      <Facts of={admission.facts} />
      {admission.ends.length > 0 && (
        <Rows columns={["why they wait no longer", "they waited", right("requests")]}>
          {admission.ends.map(({ reason, until, requests }) => (
            <tr key={reason}>
              <td>{reason}</td>
              <td className="wrap">{until}</td>
              <td className="right">{whole(requests)}</td>
            </tr>
          ))}
        </Rows>
      )}
    </div>
  );
}
