"""Drill suite of a policy: monitors that lead the loss, and faults without an alarm.

Pure: arms in, a document out. `fault_arm` is a run with a fault, `departure` when the loss left its
band and what that cost, `findings` what each drill and each monitor showed; `suite_document` is all
of it as data, which every report is made from.
"""
