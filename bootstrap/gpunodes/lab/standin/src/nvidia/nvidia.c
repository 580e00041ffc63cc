// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * A stand-in for NVIDIA's kernel driver: the names that programs look for, and the illnesses that it can have.
 *
 * It drives the functions of standin_board. It makes /dev/nvidia*, /proc/driver/nvidia and the kernel's log lines in
 * the form of the real driver; it computes nothing. Commands written to debugfs (standin_nvidia/fault), or given as the
 * module's parameter "fault", make it ill:
 *
 *   xid N CODE TIMES TEXT    an Xid of GPU N in the log, TIMES over, and to whoever waits for events
 *   sxid N CODE TEXT         the same of NVSwitch N; TEXT begins with Fatal or Non-fatal
 *   remap N                  rows of GPU N's memory wait for a reset of the GPU
 *   log TEXT                 any other line of the driver
 *   hang                     a work item of the driver blocks for ever, uninterruptibly
 *   open-hang                so does whoever opens /dev/nvidiactl from now on
 *   reboot-hang              so does an orderly reboot: the kernel asks us, and we never answer
 *   clear                    the blocked go on
 */
#include <linux/cdev.h>
#include <linux/debugfs.h>
#include <linux/device.h>
#include <linux/module.h>
#include <linux/pci.h>
#include <linux/poll.h>
#include <linux/proc_fs.h>
#include <linux/reboot.h>
#include <linux/semaphore.h>
#include <linux/seq_file.h>
#include <linux/uaccess.h>
#include <linux/version.h>

#ifndef STANDIN_VERSION
#define STANDIN_VERSION "0"
#endif
#ifdef STANDIN_NO_BUILD
/* As for a kernel that changed an interface which this version uses. */
#error "this version of the stand-in does not build for this kernel (gpunodes lab fault no-build)"
#endif

#ifdef STANDIN_PROPRIETARY
#define FLAVOUR "NVIDIA UNIX x86_64 Kernel Module  "
#else
#define FLAVOUR "NVIDIA UNIX Open Kernel Module for x86_64  "
#endif
#if defined(STANDIN_PROPRIETARY) && STANDIN_BRANCH < 590
#define OLDEST 50 /* Maxwell: the last branch for it is 580 */
#else
#define OLDEST 75 /* Turing, the first with the system processor that open modules need */
#endif

#define NVIDIA_MAJOR 195 /* Documentation/admin-guide/devices.txt calls it Nvidia's */
#define CONTROL_MINOR 255
#define MAX_GPUS 16
#define MAX_SWITCHES 8
#define EVENTS 64
#define STATUS 0x80 /* standin_board: what start-up finds */
#define STATUS_COLD 1

struct model {
	u16 device;
	const char *name;
	unsigned int memory_mib;
	unsigned int capability; /* CUDA compute capability, 90 for 9.0 */
};

/* Names and memory as nvidia-smi shows them; ids from the PCI ID list. The oldest first. */
static const struct model models[] = {
	{ 0x102d, "Tesla K80", 11441, 37 },
	{ 0x15f8, "Tesla P100-PCIE-16GB", 16384, 60 },
	{ 0x1db1, "Tesla V100-SXM2-16GB", 16384, 70 },
	{ 0x1eb8, "Tesla T4", 15360, 75 },
	{ 0x20b0, "NVIDIA A100-SXM4-40GB", 40960, 80 },
	{ 0x2330, "NVIDIA H100 80GB HBM3", 81559, 90 },
	{ 0x2684, "NVIDIA GeForce RTX 4090", 24564, 89 },
	{ 0x2901, "NVIDIA B200", 183359, 100 },
};
static const struct model unknown_model = { 0, "NVIDIA Graphics Device", 16384, 90 };

struct gpu {
	struct pci_dev *function;
	const struct model *model;
	char place[24]; /* as Xid lines name it: without the function's number */
	bool broken; /* start-up fails */
	bool reported; /* its loss stands in the log */
	bool remap; /* rows of its memory wait for a reset */
};

static struct gpu gpus[MAX_GPUS];
static char switches[MAX_SWITCHES][24];
static DEFINE_MUTEX(gpus_lock);

static struct { unsigned int minor, code; } events[EVENTS];
static u64 next_event;
static DEFINE_SPINLOCK(events_lock);
static DECLARE_WAIT_QUEUE_HEAD(events_wait);

static struct semaphore gate = __SEMAPHORE_INITIALIZER(gate, 0);
static atomic_t waiting = ATOMIC_INIT(0);
static bool open_hangs, reboot_hangs;

static char *fault = "";
module_param(fault, charp, 0444);
MODULE_PARM_DESC(fault, "a command for standin_nvidia/fault, carried out some seconds after loading");

/* What nvidia_uvm holds on to, so that this module cannot go before it. */
const char *nvidia_standin_version(void);
const char *nvidia_standin_version(void)
{
	return STANDIN_VERSION;
}
EXPORT_SYMBOL(nvidia_standin_version);

/* --- faults: the names are those of the real driver's frames; barrier() keeps each frame on the stack --- */

static noinline void os_acquire_semaphore(void)
{
	atomic_inc(&waiting);
	down(&gate);
	barrier();
}

static noinline void os_acquire_mutex(void)
{
	os_acquire_semaphore();
	barrier();
}

static noinline void os_execute_work_item(struct work_struct *work)
{
	os_acquire_mutex();
	barrier();
}

static DECLARE_WORK(hanging, os_execute_work_item);

static int nvidia_reboot(struct notifier_block *block, unsigned long action, void *unused)
{
	if (reboot_hangs)
		os_acquire_mutex();
	return NOTIFY_DONE;
}

static struct notifier_block reboot_notifier = { .notifier_call = nvidia_reboot };

static void tell(unsigned int minor, unsigned int code)
{
	spin_lock(&events_lock);
	events[next_event % EVENTS].minor = minor;
	events[next_event % EVENTS].code = code;
	next_event++;
	spin_unlock(&events_lock);
	wake_up_interruptible(&events_wait);
}

static void xid(unsigned int minor, unsigned int code, unsigned int times, const char *text)
{
	for (unsigned int time = 0; time < times; time++) {
		pr_err("NVRM: Xid (PCI:%s): %u, %s\n", gpus[minor].place, code, text);
		if (time % 256 == 255)
			cond_resched();
	}
	tell(minor, code);
}

static int carry_out(char *text)
{
	unsigned int number, code, times;
	char word[16] = "";
	int used = 0;

	text = strim(text);
	if (sscanf(text, "%15s%n", word, &used) < 1)
		return -EINVAL;
	text = skip_spaces(text + used);
	if (!strcmp(word, "xid")) {
		if (sscanf(text, "%u %u %u %n", &number, &code, &times, &used) < 3 || number >= MAX_GPUS)
			return -EINVAL;
		if (!gpus[number].place[0])
			return -ENODEV;
		xid(number, code, times, text + used);
	} else if (!strcmp(word, "sxid")) {
		if (sscanf(text, "%u %u %n", &number, &code, &used) < 2 || number >= MAX_SWITCHES)
			return -EINVAL;
		if (!switches[number][0])
			return -ENODEV;
		pr_err("nvidia-nvswitch%u: SXid (PCI:%s): %05u, %s\n", number, switches[number], code, text + used);
	} else if (!strcmp(word, "remap")) {
		if (sscanf(text, "%u", &number) < 1 || number >= MAX_GPUS)
			return -EINVAL;
		gpus[number].remap = true;
	} else if (!strcmp(word, "log")) {
		pr_err("NVRM: %s\n", text);
	} else if (!strcmp(word, "hang")) {
		schedule_work(&hanging);
	} else if (!strcmp(word, "open-hang")) {
		open_hangs = true;
	} else if (!strcmp(word, "reboot-hang")) {
		reboot_hangs = true;
	} else if (!strcmp(word, "clear")) {
		open_hangs = reboot_hangs = false;
		while (atomic_add_unless(&waiting, -1, 0))
			up(&gate);
	} else {
		return -EINVAL;
	}
	return 0;
}

static ssize_t fault_write(struct file *file, const char __user *data, size_t size, loff_t *offset)
{
	char *text = memdup_user_nul(data, min_t(size_t, size, 1000));
	int error;

	if (IS_ERR(text))
		return PTR_ERR(text);
	error = carry_out(text);
	kfree(text);
	return error ?: size;
}

static const struct file_operations fault_ops = { .owner = THIS_MODULE, .write = fault_write };
static struct dentry *debug_folder;

static void start_ill(struct work_struct *work)
{
	char *text = kstrdup(fault, GFP_KERNEL);

	if (text && *text && carry_out(text))
		pr_err("standin nvidia: unknown fault\n");
	kfree(text);
}

static DECLARE_DELAYED_WORK(starting_ill, start_ill);

/* --- the real driver looks after its GPUs too, and says when one is lost --- */

static bool answers(struct gpu *gpu)
{
	u16 vendor = 0xffff;

	pci_read_config_word(gpu->function, PCI_VENDOR_ID, &vendor);
	return vendor != 0xffff;
}

static void watch(struct work_struct *work);
static DECLARE_DELAYED_WORK(watching, watch);

static void watch(struct work_struct *work)
{
	mutex_lock(&gpus_lock);
	for (unsigned int minor = 0; minor < MAX_GPUS; minor++) {
		struct gpu *gpu = &gpus[minor];
		bool lost = gpu->function && !answers(gpu);

		if (lost && !gpu->reported) {
			xid(minor, 79, 1, "pid='<unknown>', name=<unknown>, GPU has fallen off the bus.");
			pr_err("NVRM: GPU %s: GPU has fallen off the bus.\n", pci_name(gpu->function));
		}
		gpu->reported = lost;
	}
	mutex_unlock(&gpus_lock);
	schedule_delayed_work(&watching, HZ);
}

/* --- /dev/nvidia* --- */

static int nvidia_open(struct inode *inode, struct file *file)
{
	unsigned int minor = iminor(inode);
	struct gpu *gpu;
	int error = 0;

	if (minor == CONTROL_MINOR) {
		if (open_hangs)
			os_acquire_mutex();
		file->private_data = kmemdup(&next_event, sizeof(next_event), GFP_KERNEL);
		return file->private_data ? 0 : -ENOMEM;
	}
	if (minor >= MAX_GPUS)
		return -ENODEV;
	gpu = &gpus[minor];
	mutex_lock(&gpus_lock);
	if (!gpu->function) {
		error = -ENODEV;
	} else if (gpu->broken || !answers(gpu)) {
		if (gpu->broken) {
			pr_err("NVRM: GPU %s: RmInitAdapter failed! (0x62:0x40:2142)\n", pci_name(gpu->function));
			pr_err("NVRM: GPU %s: rm_init_adapter failed, device minor number %u\n",
			       pci_name(gpu->function), minor);
		}
		error = -EIO;
	}
	mutex_unlock(&gpus_lock);
	return error;
}

static int nvidia_release(struct inode *inode, struct file *file)
{
	kfree(file->private_data);
	return 0;
}

/* Of nvidiactl: one line "MINOR CODE" for each Xid since it was opened. */
static ssize_t nvidia_read(struct file *file, char __user *data, size_t size, loff_t *offset)
{
	u64 *position = file->private_data;
	char line[32];
	int length = 0;

	if (!position)
		return 0;
	spin_lock(&events_lock);
	if (next_event > EVENTS)
		*position = max(*position, next_event - EVENTS);
	if (*position < next_event) {
		length = scnprintf(line, sizeof(line), "%u %u\n", events[*position % EVENTS].minor,
				   events[*position % EVENTS].code);
		++*position;
	}
	spin_unlock(&events_lock);
	if (length > size || copy_to_user(data, line, length))
		return -EFAULT;
	return length;
}

/* To nvidiactl: the version of a library that comes to us (we only talk to our own), or the reset of a GPU. */
static ssize_t nvidia_write(struct file *file, const char __user *data, size_t size, loff_t *offset)
{
	char version[32] = "";
	unsigned int minor;

	if (!file->private_data || size >= sizeof(version))
		return -EINVAL;
	if (copy_from_user(version, data, size))
		return -EFAULT;
	if (!strcmp(version, STANDIN_VERSION))
		return size;
	if (sscanf(version, "reset %u", &minor) == 1) {
		if (minor >= MAX_GPUS || !capable(CAP_SYS_ADMIN))
			return -EPERM;
		gpus[minor].remap = false;
		return size;
	}
	pr_err("NVRM: API mismatch: the client '%s' (pid %d)\nNVRM: has the version %s, but this kernel module has the version "
	       STANDIN_VERSION ".  Please\nNVRM: make sure that this kernel module and all NVIDIA driver\n"
	       "NVRM: components have the same version.\n", current->comm, current->pid, version);
	return -EINVAL;
}

static __poll_t nvidia_poll(struct file *file, poll_table *table)
{
	u64 *position = file->private_data;

	poll_wait(file, &events_wait, table);
	return position && *position < READ_ONCE(next_event) ? EPOLLIN | EPOLLRDNORM : 0;
}

static const struct file_operations nvidia_ops = {
	.owner = THIS_MODULE,
	.open = nvidia_open,
	.release = nvidia_release,
	.read = nvidia_read,
	.write = nvidia_write,
	.poll = nvidia_poll,
};

#if LINUX_VERSION_CODE < KERNEL_VERSION(6, 2, 0)
static char *for_all(struct device *device, umode_t *mode)
#else
static char *for_all(const struct device *device, umode_t *mode)
#endif
{
	if (mode)
		*mode = 0666;
	return NULL;
}

static struct class nvidia_class = { .name = "nvidia", .devnode = for_all };

/* --- /proc/driver/nvidia --- */

static struct proc_dir_entry *proc_root, *proc_gpus;

static int show_version(struct seq_file *out, void *unused)
{
	seq_printf(out, "NVRM version: " FLAVOUR STANDIN_VERSION "  Release Build  (gpunodes lab stand-in)\n");
	seq_printf(out, "GCC version:  gcc version %d.%d.%d\n", __GNUC__, __GNUC_MINOR__, __GNUC_PATCHLEVEL__);
	return 0;
}

static int show_params(struct seq_file *out, void *unused)
{
	seq_puts(out, "ModifyDeviceFiles: 1\nDeviceFileUID: 0\nDeviceFileGID: 0\nDeviceFileMode: 438\n");
	return 0;
}

/* Always the same for the same place, as a real one's is for the same chip. */
static void show_uuid(struct seq_file *out, struct gpu *gpu)
{
	u32 seed = pci_domain_nr(gpu->function->bus) << 16 | gpu->function->bus->number << 8;

	seq_printf(out, "GPU-%08x-%04x-4%03x-8%03x-%012x", seed * 2654435761u, gpu->model->device, seed & 0xfff,
		   seed >> 4 & 0xfff, seed);
}

static int show_information(struct seq_file *out, void *unused)
{
	struct gpu *gpu = out->private;

	seq_printf(out, "Model: \t\t %s\nIRQ:   \t\t 0\nGPU UUID: \t ", gpu->model->name);
	show_uuid(out, gpu);
	seq_printf(out, "\nVideo BIOS: \t ??.??.??.??.??\nBus Type: \t PCIe\nBus Location: \t %s\nDevice Minor: \t %u\n",
		   pci_name(gpu->function), (unsigned int)(gpu - gpus));
	seq_puts(out, "GPU Firmware: \t " STANDIN_VERSION "\nGPU Excluded:\t No\n");
	return 0;
}

/* For our libnvidia-ml, which is not NVIDIA's either. */
static int show_standin(struct seq_file *out, void *unused)
{
	struct gpu *gpu = out->private;

	seq_printf(out, "minor %u\nbus %s\ndevice %04x\nmemory %u\ncapability %u\nlost %d\nremap %d\nname %s\nuuid ",
		   (unsigned int)(gpu - gpus), pci_name(gpu->function), gpu->function->device, gpu->model->memory_mib,
		   gpu->model->capability, !answers(gpu), gpu->remap, gpu->model->name);
	show_uuid(out, gpu);
	seq_putc(out, '\n');
	return 0;
}

/* --- the PCI driver --- */

static const struct model *model_of(u16 device)
{
	for (unsigned int number = 0; number < ARRAY_SIZE(models); number++)
		if (models[number].device == device)
			return &models[number];
	return &unknown_model;
}

static int nvidia_probe(struct pci_dev *function, const struct pci_device_id *id)
{
	struct proc_dir_entry *folder;
	unsigned int minor = 0;
	struct gpu *gpu;
	u32 status = ~0u;

	if (function->class >> 8 == PCI_CLASS_BRIDGE_OTHER) {
		while (minor < MAX_SWITCHES && switches[minor][0])
			minor++;
		if (minor == MAX_SWITCHES)
			return -ENOSPC;
		strscpy(switches[minor], pci_name(function), sizeof(switches[minor]));
		pr_info("nvidia-nvswitch%u: using stand-in for NVSwitch at %s\n", minor, pci_name(function));
		pci_set_drvdata(function, NULL);
		return 0;
	}
	pci_read_config_dword(function, STATUS, &status);
	if (status == ~0u) {
		pr_err("NVRM: The NVIDIA GPU %s\nNVRM: (PCI ID: %04x:%04x) installed in this system has\n"
		       "NVRM: fallen off the bus and is not responding to commands.\n",
		       pci_name(function), function->vendor, function->device);
		return -EIO;
	}
	if (model_of(function->device)->capability < OLDEST) {
		pr_err("NVRM: The NVIDIA GPU %s (PCI ID: %04x:%04x)\nNVRM: installed in this system is not supported by the\n"
		       "NVRM: " STANDIN_VERSION " NVIDIA driver release.\n", pci_name(function), function->vendor,
		       function->device);
		return -ENODEV;
	}
	mutex_lock(&gpus_lock);
	while (minor < MAX_GPUS && gpus[minor].function)
		minor++;
	if (minor == MAX_GPUS) {
		mutex_unlock(&gpus_lock);
		return -ENOSPC;
	}
	gpu = &gpus[minor];
	*gpu = (struct gpu){ .function = function, .model = model_of(function->device), .broken = status & STATUS_COLD };
	strscpy(gpu->place, pci_name(function), sizeof(gpu->place));
	*strrchr(gpu->place, '.') = 0;
	pci_set_drvdata(function, gpu);
	mutex_unlock(&gpus_lock);

	folder = proc_mkdir(pci_name(function), proc_gpus);
	proc_create_single_data("information", 0444, folder, show_information, gpu);
	proc_create_single_data("standin", 0444, folder, show_standin, gpu);
	device_create(&nvidia_class, &function->dev, MKDEV(NVIDIA_MAJOR, minor), NULL, "nvidia%u", minor);
	return 0;
}

static void nvidia_remove(struct pci_dev *function)
{
	struct gpu *gpu = pci_get_drvdata(function);

	if (!gpu)
		return;
	device_destroy(&nvidia_class, MKDEV(NVIDIA_MAJOR, gpu - gpus));
	remove_proc_subtree(pci_name(function), proc_gpus);
	mutex_lock(&gpus_lock);
	gpu->function = NULL;
	mutex_unlock(&gpus_lock);
}

static const struct pci_device_id nvidia_ids[] = {
	{ PCI_DEVICE(PCI_VENDOR_ID_NVIDIA, PCI_ANY_ID), .class = PCI_CLASS_DISPLAY_3D << 8, .class_mask = ~0u },
	{ PCI_DEVICE(PCI_VENDOR_ID_NVIDIA, PCI_ANY_ID), .class = PCI_CLASS_DISPLAY_VGA << 8, .class_mask = ~0u },
	{ PCI_DEVICE(PCI_VENDOR_ID_NVIDIA, PCI_ANY_ID), .class = PCI_CLASS_BRIDGE_OTHER << 8, .class_mask = ~0u },
	{}
};
MODULE_DEVICE_TABLE(pci, nvidia_ids);

static struct pci_driver nvidia_driver = {
	.name = "nvidia",
	.id_table = nvidia_ids,
	.probe = nvidia_probe,
	.remove = nvidia_remove,
};

static int __init nvidia_init(void)
{
	int error = class_register(&nvidia_class);

	if (error)
		return error;
	error = register_chrdev(NVIDIA_MAJOR, "nvidia", &nvidia_ops);
	if (error)
		goto no_device;
	proc_root = proc_mkdir("driver/nvidia", NULL);
	proc_gpus = proc_mkdir("gpus", proc_root);
	proc_create_single("version", 0444, proc_root, show_version);
	proc_create_single("params", 0444, proc_root, show_params);
	device_create(&nvidia_class, NULL, MKDEV(NVIDIA_MAJOR, CONTROL_MINOR), NULL, "nvidiactl");
	error = pci_register_driver(&nvidia_driver);
	if (error)
		goto no_driver;
	debug_folder = debugfs_create_dir("standin_nvidia", NULL);
	debugfs_create_file("fault", 0200, debug_folder, NULL, &fault_ops);
	register_reboot_notifier(&reboot_notifier);
	schedule_delayed_work(&watching, HZ);
	schedule_delayed_work(&starting_ill, 5 * HZ);
	pr_info("NVRM: loading " FLAVOUR STANDIN_VERSION "  (gpunodes lab stand-in)\n");
	return 0;

no_driver:
	device_destroy(&nvidia_class, MKDEV(NVIDIA_MAJOR, CONTROL_MINOR));
	proc_remove(proc_root);
	unregister_chrdev(NVIDIA_MAJOR, "nvidia");
no_device:
	class_unregister(&nvidia_class);
	return error;
}

static void __exit nvidia_exit(void)
{
	char clear[] = "clear";

	carry_out(clear);
	cancel_delayed_work_sync(&starting_ill);
	cancel_delayed_work_sync(&watching);
	cancel_work_sync(&hanging);
	unregister_reboot_notifier(&reboot_notifier);
	debugfs_remove(debug_folder);
	pci_unregister_driver(&nvidia_driver);
	device_destroy(&nvidia_class, MKDEV(NVIDIA_MAJOR, CONTROL_MINOR));
	proc_remove(proc_root);
	unregister_chrdev(NVIDIA_MAJOR, "nvidia");
	class_unregister(&nvidia_class);
}

module_init(nvidia_init);
module_exit(nvidia_exit);
MODULE_LICENSE("Dual MIT/GPL");
MODULE_VERSION(STANDIN_VERSION);
MODULE_DESCRIPTION("Stand-in for NVIDIA's kernel driver (gpunodes lab)");
