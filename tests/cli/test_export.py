def test_chosen_metrics_into_a_file(supervise, recorded, tmp_path):
    run = recorded()
    target = tmp_path / "run.csv"

    code, out, err = supervise(
        "export", run.path, "--csv", "--metrics", "update_norm, learning_rate", "-o", target
    )

    assert (code, out) == (0, "")
    assert err == f"wrote 120 rows to {target}\n"
    assert target.read_text().splitlines()[0] == "step,rank,attempt,wall,update_norm,learning_rate"
    assert sorted(p.name for p in tmp_path.iterdir()) == [".run.secrets", "run", "run.csv"]


def test_the_suffix_gives_the_format_and_parquet_needs_a_file(supervise, recorded, tmp_path):
    run = recorded()

    assert "add -o run.parquet" in supervise("export", run.path, "--parquet")[2]
    assert supervise("export", run.path, "-o", tmp_path / "run.parquet")[0] == 0
    assert (tmp_path / "run.parquet").read_bytes().startswith(b"PAR1")
