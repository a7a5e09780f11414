"""What holds for a training by any framework: it is that of a plain loop, bit for bit, also after a resume."""

from support.frameworks.runs import Trained


class LikeAPlainLoop:
    """Tests for the fixture `trained` of a file; `plain` is the training by a plain loop."""

    def test_weights_are_those_of_a_plain_loop(self, trained: Trained, plain: Trained) -> None:
        trained.assert_same("whole", plain)

    def test_a_resumed_training_ends_with_the_same_weights(self, trained: Trained, plain: Trained) -> None:
        """The checkpoint has the residuals and the momentum of both ranks."""
        trained.assert_same("whole-resumed", plain)
        plain.assert_same("whole-resumed", as_name="whole")

    def test_as_many_bytes_are_sent(self, trained: Trained, plain: Trained) -> None:
        assert trained.result["bytes"] == plain.result["bytes"]
