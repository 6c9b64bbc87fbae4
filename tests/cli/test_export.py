import csv
import io


def test_csv_has_one_row_per_step_on_stdout(supervise, recorded):
    run = recorded()

    code, out, err = supervise("export", run.path, "--csv")

    assert (code, err) == (0, "")
    rows = list(csv.DictReader(io.StringIO(out)))
    assert out.startswith("step,rank,attempt,train_loss_raw,grad_global_norm,learning_rate,")
    assert len(rows) == 120
    assert rows[99]["train_loss_raw"] == "2.51" and rows[100]["train_loss_raw"] == "nan"
    assert rows[5] == rows[5] | {"step": "5", "rank": "0", "attempt": "0", "learning_rate": "0.001"}


def test_chosen_metrics_into_a_file(supervise, recorded, tmp_path):
    """The file is whole or not there; what was done is told on stderr."""
    run = recorded()
    target = tmp_path / "run.csv"

    code, out, err = supervise(
        "export", run.path, "--csv", "--metrics", "update_norm, learning_rate", "-o", target
    )

    assert (code, out) == (0, "")
    assert err == f"wrote 120 rows to {target}\n"
    assert target.read_text().splitlines()[0] == "step,rank,attempt,update_norm,learning_rate"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run", "run.csv"]
