def test_chosen_metrics_into_a_file(supervise, recorded, tmp_path):
    """The file is whole or not there; what was done is told on stderr."""
    run = recorded()
    target = tmp_path / "run.csv"

    code, out, err = supervise(
        "export", run.path, "--csv", "--metrics", "update_norm, learning_rate", "-o", target
    )

    assert (code, out) == (0, "")
    assert err == f"wrote 120 rows to {target}\n"
    assert target.read_text().splitlines()[0] == "step,rank,attempt,wall,update_norm,learning_rate"
    assert sorted(p.name for p in tmp_path.iterdir()) == [".run.secrets", "run", "run.csv"]


def test_the_suffix_gives_the_format_and_an_alias_a_hint(supervise, recorded, tmp_path):
    """`loss` is what others call our metric; Parquet is not written to a terminal."""
    run = recorded()
    code, _, err = supervise("export", run.path, "--metrics", "loss", "-o", tmp_path / "run.csv")

    assert code == 64
    assert "did you mean 'train_loss_raw'? it has: train_loss_raw, grad_global_norm" in err
    assert not (tmp_path / "run.csv").exists()
    assert "add -o run.parquet" in supervise("export", run.path, "--parquet")[2]
    assert "add --csv, or --parquet" in supervise("export", run.path, "-o", "run.txt")[2]
    assert supervise("export", run.path, "-o", tmp_path / "run.parquet")[0] == 0
    assert (tmp_path / "run.parquet").read_bytes().startswith(b"PAR1")
