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
