"""What drills on a job show of its policy: which monitor leads the loss, which fault has no alarm.

Pure: arms in, a document out. `fault_arm` is a run with a fault, `departure` when the loss left its
band and what that cost, `findings` what each drill and each monitor showed; `suite_document` is all
of it as data, which every report is made from.
"""
